"""The page of a run: what was decided stands first, and nothing in a record can become markup."""

from __future__ import annotations

from taugate.report.html import render_page

PROFILE = {"tried": [10, 8, 0], "matched": [8, 4, 0]}


def measurement(drafter, verifier="chain", tau=2.5):
    return {
        "type": "measurement", "drafter": drafter, "verifier": verifier, "definition": "what it means", "tau": tau,
        "low": tau - 0.1, "high": tau + 0.1, "tau_macro": tau, "tau_anchors": tau,
        "tokens": 25, "cycles": 10, "prompts": 2,
        "per_prompt": [{"prompt_id": "a", "tokens": 12, "cycles": 5}, {"prompt_id": "b", "tokens": 13, "cycles": 5}],
        "profile": PROFILE,
    }  # fmt: skip


def test_page_shows_verdicts_numbers_window_and_provenance():
    page = render_page(
        [
            {"type": "provenance", "weights_sha256": "abc"},
            {"type": "window", "outcome": "restored", "downtime_s": 31.7, "phases": []},
            measurement("reference"),
            measurement("candidate", tau=2.25),
            {"type": "verdict", "gate": "candidate chain", "outcome": "fail", "sentence": "min_tau is 2.5 & more"},
        ],
        {"chain": 2.5},
    )
    assert page.index("FAIL") < page.index("<svg") < page.index("server down for 31.7 s") < page.index("weights_sha256")
    assert page.count("<svg") == 3, "τ by verifier, acceptance by slot, candidate against reference"
    assert "2.250 [2.150, 2.350]" in page and "min_tau is 2.5 &amp; more" in page


def test_names_from_outside_are_escaped():
    record = {"type": "verdict", "gate": "<script>x</script>", "outcome": "pass", "sentence": "<b>"}
    page = render_page([record], {})
    assert "<script>" not in page and "<b>&lt;" not in page and "&lt;b&gt;" in page


def test_a_run_without_verdict_says_so():
    assert "nothing was decided" in render_page([{"type": "window", "outcome": "broken", "phases": []}], {})
