"""All architectures as CUDA would run them, on fake tensors: devices fit, the host does not wait, the work is bounded.

``python -m tests.cuda_without_gpu`` prints the figures. Here too: what must hold on a device of less capability.
"""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fairseq_alma.moe import experts
from fairseq_alma.moe.short_copies import batch_of_update
from tests.cuda_without_gpu.fake_cuda import cuda
from tests.cuda_without_gpu.programs import PROGRAMS, bf16, criterion, run, switch_lm, text, tokens_of

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and not torch.backends.cuda.is_built(), reason="a compiler makes the device guard"
)
WAITS = {
    "moe/expert_parallel.py": "places of an expert, once a batch; at test sizes of messages, once a layer",
    "moe/experts.py": "counts where no capacity bounds them, in fp32 or before sm_90",
    "moe/mixture_layer.py": "hard gates draw on the CPU, so that all devices draw the same",
    "moe/dispatch.py": "growth measures",
    "text/grow.py": "growth measures",
    "training/spread_parameters.py": "a checkpoint is put together on the CPU",
    "fairseq/utils.py": "a checkpoint goes to the CPU",
    "images/mixtures.py": "growth measures",
    "images/firefly.py": "growth measures",
    "images/candidate_vgg.py": "a grown network gets its weights, by places that the scores decide",
    "images/image_models.py": "a grown network goes to the device",
    "images/networks.py": "a grown network gets its weights, by places that the CPU draws",
    "growth/tensors.py": "weights grow by places that the CPU knows",
    "moe/gate.py": "a grown gate is laid out on the CPU",
}
"""Where the host may wait for the device; nowhere in the training of a language model on one device."""
GROWTH = {name for name, why in WAITS.items() if "grow" in why}
LIMITS = {  # operations, casts, GB of a batch of 8 x 512 tokens, 12 experts, weights cast already
    "alma_switch_lm_base, bf16": (330, 19, 6.9),
    "alma_switch_lm_base, fp32": (318, 0, 16.0),
    "alma_switch_lm_large, bf16": (609, 34, 16.9),
    "alma_switch_lm_large, fp32": (582, 0, 33.6),
    "an update by fused_adam": (10, 0, 3.3),
    "an update of a branch": (10, 0, 0.3),
}
LONGER = {
    "layers computed twice, bf16",
    "growth of alma_moe_vgg",
    "growth of alma_firefly_vgg",
    "growth of alma_firefly_vgg, in depth",
    "fully shard, fp32",
}


@pytest.fixture(autouse=True)
def known_capabilities():
    experts._groups_without_wait.cache_clear()
    yield
    experts._groups_without_wait.cache_clear()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONGER else ()) for name in PROGRAMS]
)
def test_a_program_runs_on_one_device_and_the_host_waits_where_it_must(name):
    counts = run(name)
    waits = {place.rsplit(":", 1)[0].removeprefix("fairseq_alma/") for place in counts.host_reads + counts.host_writes}
    assert waits <= set(WAITS)
    assert not waits or not name.startswith(("alma_switch_lm", "alma_umix", "an update"))
    assert "growth" in name or not waits & GROWTH
    if name.startswith("expert parallel"):
        assert sum(counts.host_reads.values()) == 1
    if name in LIMITS:
        found = (counts.operations, counts.casts, counts.bytes / 1e9)
        assert all(here <= limit for here, limit in zip(found, LIMITS[name], strict=True)), found


@pytest.mark.filterwarnings("error:FSDP2-wrapped module .FSDPAlmaSwitchLM")
@pytest.mark.parametrize(("name", "gathered_in"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_fully_shard_gathers_in_the_precision_of_products_and_reduces_in_fp32_once_an_update(name, gathered_in):
    counts = run(f"fully shard, {name}")
    layers, exact = 4, torch.float32
    assert not any(kind == "reduce" for kind, _ in counts.before.messages)
    assert {dtype: number for (kind, dtype), number in counts.num_messages.items() if kind == "reduce"} == {
        exact: layers + 1
    }
    assert counts.num_messages["gather", gathered_in] >= 2 * layers - 1
    assert counts.of_update.operations <= 14 and not counts.of_update.host_reads


@pytest.mark.slow
def test_before_sm_90_experts_are_computed_by_places_whatever_their_capacity(monkeypatch):
    monkeypatch.setitem(PROGRAMS, "here", lambda: text("tiny", "bf16", 2, 64, capacity_factor=2.0))
    before = run("here", (8, 0))
    experts._groups_without_wait.cache_clear()
    since = run("here", (9, 0))
    assert before.by_name["_grouped_mm"] == 0 < since.by_name["_grouped_mm"]
    assert not before.host_reads and not since.host_reads


@pytest.mark.slow
def test_the_step_that_compile_fuses_is_one_graph_for_all_updates():
    with cuda():
        model, sample, step = switch_lm("tiny", num_experts=4, layers=2), tokens_of(2, 16), criterion()
        given = (model, sample["net_input"], sample["target"], False)
        with bf16(), batch_of_update(0):
            found = torch._dynamo.explain(step._losses)(*given)
        counter = CompileCounter()
        compiled = torch.compile(step._losses, backend=counter, dynamic=False)
        for number in range(2):
            with bf16(), batch_of_update(number):
                compiled(*given)
    assert not found.break_reasons
    assert counter.frame_count == 1
    (graph,) = found.graphs
    parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    assert any("baddbmm" in str(node.target) for part in parts for node in part.graph.nodes)
