"""The pytest plugins, nothing else: fixtures/plugin.py lists the modules, each of which owns one feature."""

pytest_plugins = ["pytester", "fixtures.plugin"]
