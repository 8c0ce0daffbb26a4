"""Recorded layers are believed only as far as they equal the eager call; CUDA's part is played by a stand-in."""

from __future__ import annotations

import pytest
import torch

from taugate.target.graphs import Graphs


class StandIn:
    """A graph that replays `work`; what was computed while recording stays where it was."""

    def __init__(self, work, fails=False):
        self.work, self.fails = work, fails

    def capture_begin(self, **_):
        pass

    def capture_end(self):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def replay(self):
        self.work()


@pytest.fixture
def graphs(monkeypatch):
    """Graphs of stand-ins; `made` takes what the next graph replays."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    graphs, made = Graphs(room=100), {}
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: StandIn(lambda: made["work"](graphs), made.get("fails")))
    return graphs, made


def replays(factor):
    def work(graphs):
        for recorded in graphs._recorded.values():
            recorded.out.copy_(recorded.given * factor())

    return work


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def test_a_graph_is_used_alone_after_two_layers_agreed(graphs):
    lane, made = graphs
    weight, eager = [2.0], []

    def layer(states):
        eager.append(weight[0])
        return states * weight[0]

    made["work"] = replays(lambda: weight[0])
    for number, expected in enumerate([1, 3, 4, 4, 4]):  # recording calls the layer too
        weight[0] = 2.0 + number
        states = torch.full((1, 3, 2), float(number))
        assert torch.equal(lane.run("key", layer, states), states * weight[0])
        assert len(eager) == expected
    assert lane.count == 1 and not lane.refused


def test_prompts_of_all_lengths_share_one_place_and_longer_ones_run_eagerly(graphs):
    """A place for each length would take as much memory as all prompts together, which no plan counts."""
    lane, made = graphs
    storages = set()
    for length in (3, 50, 7, 51):
        states = torch.ones(1, length, 2)
        for _ in range(3):
            made["work"] = lambda graphs, n=length: graphs._recorded[n].out.copy_(2 * graphs._recorded[n].given)
            assert torch.equal(lane.run(length, lambda given: given * 2, states), 2 * states)
        recorded = lane._recorded.get(length)
        assert (recorded is None) == (length == 51), "102 elements are more than the room of 100"
        storages |= {storage(recorded.given)} if recorded else set()
    assert len(storages) == 1 and lane.count == 3 and not lane.refused


def test_what_comes_out_stays_where_it_is_as_long_as_the_plan_has_room_for_it(graphs):
    """Three times the room of 100; what comes after goes to the place of what was given."""
    lane, made = graphs
    kept = []
    for length in (50, 45, 40, 20, 15, 4):
        made["work"] = lambda graphs, n=length: graphs._recorded[n].out.copy_(2 * graphs._recorded[n].given)
        for value in range(5):
            states = torch.full((1, length, 2), float(value))
            found = lane.run(length, lambda given: given * 2, states)
            assert torch.equal(found, 2 * states) and torch.equal(states, torch.full((1, length, 2), float(value)))
            assert storage(found) != storage(lane._recorded[length].out) if length in lane._recorded else True
        kept.append(storage(lane._recorded[length].out) != storage(lane._place))
    assert kept == [True, True, True, False, True, False], "100 + 90 + 80 + 30 are all of 300"
    assert not lane.refused


def test_bits_are_copied_whatever_they_are():
    """Signed zeros, subnormals, infinities and each NaN, of both widths."""
    from taugate.target.graphs import _copy

    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float32):
        states = bits.view(1, 64, 1024).view(dtype)
        for state in (states, states.transpose(1, 2)):
            there = torch.zeros(state.shape, dtype=dtype)
            assert _copy(state, there) is there
            assert torch.equal(there.view(torch.int16), state.contiguous().view(torch.int16))


def test_lanes_are_made_anew_for_longer_prompts_and_where_graphs_have_no_room():
    from taugate.target.lanes import Lanes

    lanes = Lanes("cpu", 1, recorded=100)
    assert lanes.serve(1, 100) and lanes.serve(1, 50)
    assert not lanes.serve(1, 101) and not lanes.serve(2, 100) and not lanes.serve(1, 0)
    assert Lanes("cpu", 1, recorded=0).serve(1, 0)


def test_a_graph_that_differs_is_given_up_and_its_result_not_used(graphs):
    lane, made = graphs
    weight = [2.0]
    made["work"] = replays(lambda: 2.0)  # as if it still read the weights that it was recorded with
    for number in range(5):
        weight[0] = 2.0 if number < 2 else 3.0
        states = torch.ones(1, 3, 2)
        assert torch.equal(lane.run("key", lambda states: states * weight[0], states), states * weight[0])
    assert lane.refused == "a replayed layer differed from the eager call" and lane.count == 0


def test_what_cannot_be_recorded_runs_eagerly(graphs):
    lane, made = graphs
    made |= {"work": lambda graphs: None, "fails": True}
    for _ in range(4):
        assert torch.equal(lane.run("key", lambda states: states + 1, torch.ones(1, 2, 2)), torch.full((1, 2, 2), 2.0))
    assert lane.refused == "operation not permitted when stream is capturing"


def test_replayed_calls_count_as_evidence_of_the_layer_and_the_run_that_replay_them():
    """Recorded in one run, replayed in another: the evidence is the other's, and another path is refused."""
    from taugate.errors import KernelPathError
    from taugate.target.kernels import count_again, enter_layer, kernel_path, recorded_calls

    with kernel_path("torch", "qwen3_5_text", "cpu") as first, recorded_calls() as calls:
        calls.append(("torch_chunk_gated_delta_rule", "transformers.models.qwen3_5.modeling_qwen3_5"))
    assert not first.calls
    with kernel_path("torch", "qwen3_5_text", "cpu") as second:
        for layer in (0, 1, 4):
            enter_layer(layer)
            count_again(calls)
        enter_layer(-1)
    (layers,) = second.require()["layers"].values()
    assert layers == [0, 1, 4]
    with kernel_path("torch", "qwen3_5_text", "cpu") as third:
        count_again([("torch_chunk_gated_delta_rule", "fla.ops.gated_delta_rule.chunk")])
    with pytest.raises(KernelPathError, match="fla"):
        third.require()
