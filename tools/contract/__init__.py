"""The contract with the real server: SGLang on a CPU as the unit of a systemd host, and what it answers.

`make contract` installs it and records fixtures/contract/*.json. SGLang does not support this way to run it; the
version is pinned, and so is everything it needs.
"""
