"""What is run on the device, and counted: a batch of each architecture, an update, growth, tests, several processes."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from fairseq import models
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.optim import build_optimizer
from fairseq.utils import move_to_cpu
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh

import fairseq_alma
from fairseq_alma.checkpoints.model_options import SWITCH_SIZES
from fairseq_alma.images import networks
from fairseq_alma.images.image_classifier import GrowthData, ImageEnsemble
from fairseq_alma.images.networks import ImageKind
from fairseq_alma.learners.learner import Growth
from fairseq_alma.models.alma_ensemble import AlmaEnsemble, EnsembleDecoder
from fairseq_alma.moe.expert_parallel import spread_experts
from fairseq_alma.moe.short_copies import batch_of_update
from fairseq_alma.text.criterion import AlmaSwitchCrossEntropy
from fairseq_alma.text.grow import measure_expert_losses
from fairseq_alma.text.model import build_from_config
from fairseq_alma.text.sharding import shard_decoder
from fairseq_alma.training.average import WeightAverage
from fairseq_alma.training.branch import LRBranch
from fairseq_alma.training.saves import as_it_is
from tests.cuda_without_gpu.fake_cuda import counted, cuda, tensors_in
from tests.text.switch_models import config_of, dictionary_of

fairseq_alma.register()
VOCABULARY = 50_004
TREES = "[[0,[1,2],3],[[0,3],1,2]]"
ADAM = {"lr": [1e-3], "adam_betas": "(0.9,0.98)", "adam_eps": 1e-8, "weight_decay": 0.0, "use_old_adam": False}
ADAM |= {"fp16_adam_stats": False, "tpu": False, "_name": None}


def criterion():
    task = SimpleNamespace(target_dictionary=dictionary_of(4))
    return AlmaSwitchCrossEntropy(task, sentence_avg=False)


def switch_config(size, num_experts=12, **options):
    """Return the configuration of one of the paper's models, or of the small one."""
    sizes = {f"decoder_{name}": value for name, value in SWITCH_SIZES[f"alma_switch_lm_{size}"].items()}
    own = {"num_experts": num_experts, "activation_fn": "gelu", "dropout": 0.1, "tokens_per_sample": 512}
    return {"_name": f"alma_switch_lm_{size}", **vars(config_of()), **sizes, **own, **options}


def switch_lm(size, vocabulary=VOCABULARY, **options):
    return build_from_config(switch_config(size, **options), vocabulary, "cuda").train()


def joint_lm(vocabulary=VOCABULARY):
    words = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2"
    config = {"_name": "alma_umix", "num_members": 2, "member_arch": "alma_switch_lm_tiny", "member_options": words}
    config |= {"tokens_per_sample": 512, "max_target_positions": None}
    dictionary = dictionary_of(vocabulary - 4)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    with torch.device("cuda"):
        return models.build_model(OmegaConf.create(config), task).train()


def tokens_of(batch_size, length):
    tokens = torch.zeros(batch_size, length + 1, dtype=torch.long, device="cuda")
    inputs = {"src_tokens": tokens[:, :-1].contiguous(), "src_lengths": None}
    sizes = {"nsentences": batch_size, "ntokens": batch_size * length}
    return {**sizes, "net_input": inputs, "target": tokens[:, 1:].contiguous()}


def bf16(is_on=True):
    return torch.autocast("cuda", torch.bfloat16, enabled=is_on)


def learn(model, sample, precision):
    """Compute the gradients of a batch."""
    with bf16(precision == "bf16"):
        loss, _, log = criterion()(model, sample)
    loss.backward()
    return log


def batch(model, sample, precision):
    """Count a batch that is not the first of its update: weights are cast already. There are no gradients yet."""
    with batch_of_update(0):
        with counted():  # which answers what the host asks
            learn(model, sample, precision)
        model.zero_grad()
        with counted() as counts:
            learn(model, sample, precision)
    return counts


def text(size, precision, batch_size=8, length=512, **options):
    return batch(switch_lm(size, **options), tokens_of(batch_size, length), precision)


def test_batch(precision):
    """A held-out batch, no token of which is dropped, some of it padding."""
    model, sample = switch_lm("tiny").eval(), tokens_of(2, 64)
    sample["ntokens"] -= 1
    with torch.no_grad(), bf16(precision == "bf16"), counted() as counts:
        criterion()(model, sample)
    return counts


def generation():
    """Two tokens, one after the other."""
    model, state = switch_lm("tiny").eval(), {}
    tokens = torch.zeros(3, 2, dtype=torch.long, device="cuda")
    with torch.no_grad(), counted() as counts:
        for length in (1, 2):
            model(tokens[:, :length], incremental_state=state)
        model.decoder.reorder_incremental_state_scripting(state, torch.zeros(3, dtype=torch.long, device="cuda"))
    return counts


def growth():
    """What alma-grow measures: the loss of each expert's tokens."""
    model, sample = switch_lm("tiny"), tokens_of(2, 64)
    with torch.no_grad(), counted() as counts:
        measure_expert_losses(model, [{**sample}], 1)
    return counts


def update(optimizer_name, size="base"):
    """Clip, optimizer step and moving average of an update."""
    model = switch_lm(size)
    config = OmegaConf.create({**ADAM, "_name": optimizer_name})
    optimizer = build_optimizer(config, list(model.parameters()))
    average = WeightAverage(ema_half_life="1/16")
    for number in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        average.after_step(model, number)
        with counted() as counts:
            step(optimizer)
        with counted() as averaging:
            average.after_step(model, number + 1)
    counts.of_average = averaging
    return counts


@contextlib.contextmanager
def processes(number):
    """Be the first of several processes, of which the others are pretended."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def expert_parallel(precision):
    with processes(4):
        model = switch_lm("tiny")
        spread_experts(model)
        return batch(model, tokens_of(2, 64), precision)


def fully_shard(precision, size="tiny", batch_size=2, length=64):
    """The last of several batches of an update, and the update, of one of four processes."""
    with processes(4):
        with unset_fake_temporarily():
            mesh = init_device_mesh("cuda", (4,))
        model = switch_lm(size)
        shard_decoder(model, mesh, torch.bfloat16 if precision == "bf16" else None)
        wrapped = models.DistributedFairseqModel(None, model, None, torch.device("cuda"))
        optimizer = build_optimizer(OmegaConf.create({**ADAM, "_name": "fused_adam"}), list(wrapped.parameters()))
        with counted() as before, wrapped.no_sync():
            learn(wrapped, tokens_of(batch_size, length), precision)
        with counted() as counts:
            learn(wrapped, tokens_of(batch_size, length), precision)
            optimizer.all_reduce_grads(wrapped)
        step(optimizer)  # makes its state
        with counted() as counts.of_update:
            step(optimizer)
    counts.before = before
    return counts


def gathering(spread):
    """A checkpoint of the first of four processes, which puts the parts of a model and of its moments together."""
    with processes(4):
        with unset_fake_temporarily():
            mesh = init_device_mesh("cuda", (4,))
        model = switch_lm("tiny")
        whole = {name: each.shape for name, each in model.state_dict().items()}
        shapes = [each.shape for each in model.parameters()]
        spread(model, mesh)
        optimizer = build_optimizer(OmegaConf.create({**ADAM, "_name": "fused_adam"}), list(model.parameters()))
        with counted():  # which answers what the host asks
            learn(model, tokens_of(2, 64), "fp32")
        step(optimizer)
        with counted() as counts:
            optimizer.optimizer.consolidate_state_dict()
            saved = model.state_dict()
            moments = optimizer.state_dict()["state"]
    assert {name: each.shape for name, each in saved.items()} == whole
    assert [each["exp_avg"].shape for each in moments.values()] == shapes
    return counts


def saving():
    """A checkpoint that is written beside the training: what goes to the host, and the copy that is made there."""
    model = switch_lm("tiny")
    optimizer = build_optimizer(OmegaConf.create({**ADAM, "_name": "fused_adam"}), list(model.parameters()))
    with counted():  # which answers what the host asks
        learn(model, tokens_of(2, 64), "bf16")
    step(optimizer)
    with counted() as counts:  # as fairseq's Trainer collects it
        state = {"model": model.state_dict(), "last_optimizer_state": optimizer.state_dict(), "extra_state": {}}
        kept = as_it_is(move_to_cpu(state), copies_weights=False)
    assert not any(each.is_cuda for each in tensors_in(kept))
    return counts


def decaying():
    """An update of a branch, whose learning rate decays."""
    model = switch_lm("tiny")
    optimizer = build_optimizer(OmegaConf.create({**ADAM, "_name": "fused_adam"}), list(model.parameters()))
    branch = LRBranch(branch_from=0, branch_until=4)
    for number in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with counted() as counts:
            branch.before_step(optimizer, number)
            step(optimizer)
            branch.after_step(model, number)
    return counts


def ensemble(precision):
    """A held-out batch through two members of an ensemble."""
    members = [switch_lm("tiny", num_experts=number) for number in (2, 4)]
    model = AlmaEnsemble(EnsembleDecoder(dictionary_of(VOCABULARY - 4), members, [0.5, 0.5]), ()).eval()
    sample = tokens_of(2, 64)
    with torch.no_grad(), bf16(precision == "bf16"), counted() as counts:
        log_probs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)
        torch.nn.functional.nll_loss(log_probs.flatten(0, 1), sample["target"].flatten(), reduction="sum")
    return counts


def step(optimizer):
    """Make an update of an optimizer whose gradients are there."""
    optimizer.multiply_grads(0.5)
    optimizer.clip_grad_norm(1.0)
    optimizer.step()


def image_network(arch, num_members=1, **options):
    """Return a network, and its options."""
    model_class = ARCH_MODEL_REGISTRY[arch]
    config = OmegaConf.create({**vars(MODEL_DATACLASS_REGISTRY[arch]()), **options})
    with torch.device("cuda"):
        grown = model_class.read_grown(config)
        return model_class.build_network(config, ImageKind((3, 32, 32), 10), grown, num_members), config


def images(arch, precision, num_members=1, training=True, **options):
    """A batch of images through some members side by side."""
    network = image_network(arch, num_members, **options)[0].train(training)
    pictures = torch.zeros(8, 3, 32, 32, device="cuda")
    labels = torch.zeros(8, dtype=torch.long, device="cuda")
    with counted() as counts, bf16(precision == "bf16"), torch.set_grad_enabled(training):
        logits = network(pictures if num_members == 1 else pictures.expand(num_members, *pictures.shape))
        if training:
            torch.nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.repeat(num_members)).backward()
    return counts


def image_ensemble():
    """Images through two members of an ensemble, which are of different architectures."""
    members = []
    for arch in ("alma_mlp", "alma_vgg"):
        network, _ = image_network(arch)
        members.append(ARCH_MODEL_REGISTRY[arch](network))
    model = ImageEnsemble(members, [0.5, 0.5], ()).eval()
    with torch.no_grad(), counted() as counts:
        model(torch.zeros(8, 3, 32, 32, device="cuda"))
    return counts


def moved(module, to):
    """Serve as ``Module.to``, which would exchange what fake tensors are."""
    device = to.device if torch.is_tensor(to) else to

    def copied(each):
        return torch.empty(each.shape, dtype=each.dtype, device=device).copy_(each.detach())

    for part in module.modules():
        part._buffers |= {name: copied(each) for name, each in part.named_buffers(recurse=False)}
        weights = part.named_parameters(recurse=False)
        part._parameters |= {name: torch.nn.Parameter(copied(each)) for name, each in weights}
    return module


def image_growth(arch, growth, **options):
    """Growth of a network for images between two stages, and a batch of what it has become."""
    network, config = image_network(arch, **options)
    pictures, labels = torch.zeros(8, 3, 32, 32, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda")
    data = GrowthData(lambda: (pictures, labels), (pictures, labels), 8)
    # drawn on the CPU by numbers, which fake tensors have not
    parts = mock.patch.object(networks, "unequal_parts", lambda source, shape, generator: torch.ones(shape))
    with parts, mock.patch.object(torch.nn.Module, "to", moved), counted() as counts:
        grown, _ = ARCH_MODEL_REGISTRY[arch].grow(network, growth, config, data, torch.Generator().manual_seed(0))
        torch.nn.functional.cross_entropy(grown.train()(pictures).flatten(0, -2), labels).backward()
    assert all(each.is_cuda for each in (*grown.parameters(), *grown.buffers()))
    return counts


SIZES = {f"{size}, {precision}": (size, precision) for size in ("base", "large") for precision in ("bf16", "fp32")}
PROGRAMS = {
    **{f"alma_switch_lm_{name}": lambda how=how: text(*how) for name, how in SIZES.items()},
    "layers computed twice, bf16": lambda: text("tiny", "bf16", 2, 64, checkpoint_activations=True),
    "a tree of gates, bf16": lambda: text("tiny", "bf16", 2, 64, num_experts=4, gate_trees=TREES),
    "alma_umix, bf16": lambda: batch(joint_lm(), tokens_of(2, 64), "bf16"),
    "alma_umix, fp32": lambda: batch(joint_lm(), tokens_of(2, 64), "fp32"),
    "expert parallel, bf16": lambda: expert_parallel("bf16"),
    "expert parallel, fp32": lambda: expert_parallel("fp32"),
    "fully shard, bf16": lambda: fully_shard("bf16"),
    "fully shard, fp32": lambda: fully_shard("fp32"),
    "a checkpoint, fully shard": lambda: gathering(shard_decoder),
    "a checkpoint, expert parallel": lambda: gathering(lambda model, mesh: spread_experts(model)),
    "a checkpoint, in the background": saving,
    "test, bf16": lambda: test_batch("bf16"),
    "test, fp32": lambda: test_batch("fp32"),
    "an ensemble, bf16": lambda: ensemble("bf16"),
    "an ensemble, fp32": lambda: ensemble("fp32"),
    "an ensemble of images": image_ensemble,
    "generation": generation,
    "growth": growth,
    "an update by adam": lambda: update("adam"),
    "an update by fused_adam": lambda: update("fused_adam"),
    "an update of a branch": decaying,
}
MIXTURES = {"num_experts": 4, "gate_trees": ""}
for _precision in ("bf16", "fp32"):
    for _arch, _options in (
        ("alma_mlp", {}),
        ("alma_vgg", {}),
        ("alma_moe_mlp", MIXTURES),
        ("alma_moe_mlp", {**MIXTURES, "gate": "hard"}),
        ("alma_moe_vgg", MIXTURES),
        ("alma_firefly_vgg", {}),
    ):
        _name = f"{_arch}{', hard' if 'gate' in _options else ''}, {_precision}"
        PROGRAMS[_name] = lambda how=(_arch, _precision), more=_options: images(*how, **more)
for _arch in ("alma_mlp", "alma_vgg"):
    PROGRAMS[f"{_arch}, 3 side by side, bf16"] = lambda arch=_arch: images(arch, "bf16", 3)


WIDER = {"width": 64, "hidden-layers": 3}
HOW = ("split", "loss", 1)
for _arch, _growth, _options in (
    ("alma_mlp", Growth(0, *HOW, sizes=WIDER), {"width": 32, "hidden_layers": 2}),
    ("alma_vgg", Growth(0, *HOW, sizes={"channels": 24}), {"channels": 16}),
    ("alma_moe_vgg", Growth(1, *HOW), MIXTURES),
    ("alma_firefly_vgg", Growth(0, *HOW, share=0.25), {"channels": 8}),
    ("alma_firefly_vgg", Growth(0, *HOW, share=0.25, grow_in="depth"), {"channels": 8}),
):
    _name = f"growth of {_arch}{', in depth' if _growth.grow_in == 'depth' else ''}"
    PROGRAMS[_name] = lambda how=(_arch, _growth), more=_options: image_growth(*how, **more)


def run(name, capability=(9, 0)):
    """Return what a program gives the device to do."""
    with cuda(capability):
        return PROGRAMS[name]()
