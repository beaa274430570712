"""A CUDA device that computes nothing: torch's fake tensors, and a count of what a real one would have been given.

`FakeTensorMode` runs this package's code on tensors that have a device, a shape and a precision and no numbers. It
raises on mixed devices. On top of it `Counts` counts what would be launched, and notes every wait for the device with
file and line. A build of torch for CPUs lacks a device guard, which autograd asks for: ``guard.cpp``, compiled once.
Where there is a GPU the same code runs on it.
"""

import contextlib
import ctypes
import hashlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).parent
OURS = ("/fairseq_alma/", "/fairseq/", "/fairseq_cli/")
NO_WORK = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh"}
NO_WORK |= {"detach", "alias", "set_", "resize_", "_reshape_alias", "is_same_size", "_local_scalar_dense", "device"}
PICKS = {"embedding", "index", "index_select", "gather"}
"""They read no more of their first argument than they write."""
PUTS = {"scatter_", "scatter_add_", "index_put_", "index_copy_", "index_add_"}
"""They write no more of their first argument than they read of the others."""
ADDS = {"scatter_add_", "index_add_"}
"""Of these, those that read it first."""
MESSAGES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce", "allreduce_": "reduce"}
MESSAGES |= {"alltoall_base_": "exchange"}
WRITES_ONLY = {"bernoulli_", "zero_", "fill_", "copy_"}
"""They read nothing of their first argument."""
UNKNOWN = {"nonzero", "bincount", "unique2", "masked_select", "_unique2"}
"""Their results' shapes are in the numbers."""
COUNTING = []
ON_CPU = F.scaled_dot_product_attention


class Counts(TorchDispatchMode):
    """What a part of a program gives a device to do.

    Attributes:
        operations: launches of kernels, about: operations that are no views.
        casts: those that change a precision.
        bytes: that they read and write, each its arguments once and its results once.
        peak: the most memory at a time of what the part makes, in bytes.
        by_name: operations by their names; ``bytes_of`` likewise.
        by_place: operations by the line of ours that asks for them, and their names; ``bytes_at`` likewise. Under
            torch's anomaly detection, what autograd adds to a line is found under the line.
        host_reads: where the host waits for a number of the device, as ``file:line``.
        host_writes: where it waits for a copy to the device.
        on_host: where it makes a tensor of its own beside the device.
        messages: bytes given to collective operations, by kind and precision; ``num_messages`` how many.
    """

    def __init__(self):
        super().__init__()
        self.operations = self.casts = self.bytes = 0
        self.peak, self._live, self._new = 0, {}, 0
        self.by_name, self.bytes_of, self.by_place, self.bytes_at = Counter(), Counter(), Counter(), Counter()
        self.host_reads, self.host_writes, self.on_host = Counter(), Counter(), Counter()
        self.messages, self.num_messages = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = tensors_in((args, {key: each for key, each in kwargs.items() if key != "out"}))
        on_device = [each for each in given if each.is_cuda]
        is_fake = any(isinstance(each, FakeTensor) for each in given)
        if "layer_norm" in name and on_device and len({each.dtype for each in parts_of_norm(name, args)}) > 1:
            raise TypeError("CUDA's layer norm takes weights in the precision of what it is of")
        by_mask = name == "index" and any(each.dtype == torch.bool for each in tensors_in(args[1]))
        if on_device and (by_mask or name == "_local_scalar_dense" or name in UNKNOWN):
            self.host_reads[place()] += 1
        if is_fake and on_device and name == "_local_scalar_dense":
            return some_number(on_device[0])
        if is_fake and on_device and by_mask:
            return args[0]  # none is left out
        if is_fake and name in UNKNOWN:
            return unknown(name, func, args, kwargs)
        result = func(*args, **kwargs)
        made = tensors_in(result)
        self._keep(made)
        moves = name in ("_to_copy", "copy_") and made
        if moves and on_device and not made[0].is_cuda:
            self.host_reads[place()] += 1
        elif moves and made[0].is_cuda and any(not each.is_cuda for each in given if each.dim() or name == "_to_copy"):
            self.host_writes[place()] += 1
        elif not given and made and not made[0].is_cuda:
            self.on_host[place()] += 1
        if not any(each.is_cuda for each in (*given, *made)) or func.is_view or name in NO_WORK:
            return result
        if name in MESSAGES:
            key = MESSAGES[name], given[-1].dtype
            self.messages[key] += size(given[-1])
            self.num_messages[key] += 1
        self._count(name, given, made)
        return result

    def _keep(self, made):
        """Note the memory of new tensors; whose memory is given back is looked at when it may be the most so far."""
        for each in made:
            storage = each.untyped_storage()
            if each.is_cuda and storage._cdata not in self._live:
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self._new += storage.nbytes()
        if self._new > self.peak:
            self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
            self._new = sum(nbytes for _, nbytes in self._live.values())
            self.peak = max(self.peak, self._new)

    def _count(self, name, given, made):
        self.operations += 1
        self.by_name[name] += 1
        here = f"{asked_for_at()}  {name}"
        self.by_place[here] += 1
        if name in ("_to_copy", "copy_") and given[-1].dtype != made[0].dtype:
            self.casts += 1
        written = sum(map(size, made))
        read = given[1:] if name in WRITES_ONLY else given
        moved = 2 * written if name in PICKS else sum(map(size, read)) + written
        if name in PUTS:
            moved = (3 if name in ADDS else 2) * sum(map(size, given[1:]))
        self.bytes += moved
        self.bytes_of[name] += moved
        self.bytes_at[here] += moved

    def __str__(self):
        return f"{self.operations:,} operations, {self.casts} casts, {self.bytes / 1e9:.2f} GB"


class NoStream:
    """Stands for a stream of a device, and for an event in one: nothing waits for it."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_event(self, event):
        pass

    wait_stream = wait_event

    def record(self, *args):
        return self

    record_event = record


class _AsOnCuda(TorchFunctionMode):
    """Makes ``torch.tensor``, and an index that is a list, go the way that they go on CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            device = kwargs.pop("device")
            made = func(*args, **kwargs)
            return torch.empty(made.shape, dtype=made.dtype).to(device)  # no constant, which is copied for real
        if func is torch.Tensor.__getitem__ and args[0].is_cuda:
            given, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
            found = (
                torch.zeros(len(each), dtype=torch.long).to(given.device) if isinstance(each, list) else each
                for each in index
            )
            args = (given, tuple(found))
        return func(*args, **kwargs)


def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **others):
    """Attend by the kernel that CUDA would choose, of which fake tensors know nothing."""
    if not query.is_cuda:
        return ON_CPU(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    aten = torch.ops.aten
    if attn_mask is None and query.dtype == torch.bfloat16:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    learns = torch.is_grad_enabled() and query.requires_grad
    how = (attn_mask, learns, dropout_p, is_causal)
    return aten._scaled_dot_product_efficient_attention(query, key, value, *how, scale=scale)[0]


def listed(tensor):
    """Serve as ``FakeTensor.tolist``: one wait for all numbers, which are ones."""
    found = some_number(tensor)
    if tensor.is_cuda:
        for counts in COUNTING:
            counts.host_reads[place()] += 1
    for length in reversed(tensor.shape):
        found = [found] * length
    return found


def some_number(tensor):
    """Return a number of a tensor's type; there is no other to be had."""
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def unknown(name, func, args, kwargs):
    """Return what an operation might whose result's shape is in the numbers."""
    first = args[0]
    if name == "bincount":
        weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
        dtype = torch.long if weights is None else weights.dtype
        return torch.zeros(kwargs.get("minlength", 1), dtype=dtype, device=first.device)
    if name == "nonzero":
        return torch.zeros(1, first.dim(), dtype=torch.long, device=first.device)
    raise NotImplementedError(f"{name} waits for the device")


def parts_of_norm(name, args):
    """Return what must be in one precision: gradient, argument, weight and bias, but neither mean nor rstd."""
    return tensors_in((args[0], args[1], *args[5:7]) if name.endswith("backward") else (args[0], *args[2:4]))


def tensors_in(tree):
    """Return the tensors of arguments or of a result."""
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def size(tensor):
    """Return how many bytes a tensor has, or its storage where it is a broadcast one."""
    if not tensor.is_cuda:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def place():
    """Return the line of this package, or of fairseq, that is being run."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_ours(name):
            parts = name.split("/")
            start = max(
                len(parts) - 1 - parts[::-1].index(each.strip("/")) for each in OURS if each.strip("/") in parts
            )
            return f"{'/'.join(parts[start:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def is_ours(file):
    """Return whether a file is one of this package, or of fairseq."""
    return any(part in file for part in OURS) and "/cuda_without_gpu/" not in file


def asked_for_at():
    """Return `place`, or, for what autograd does by itself, the line whose gradient it computes, if it was noted."""
    node = torch._C._current_autograd_node()
    lines = [] if node is None else node.metadata.get("traceback_", [])
    ours = [
        found for line in lines if (found := re.match(r' *File "(.*/(.*/.*))", line (\d+)', line)) if is_ours(found[1])
    ]
    return f"{ours[-1][2]}:{ours[-1][3]} gradient" if ours else place()


@contextlib.contextmanager
def cuda(capability=(9, 0)):
    """Let tensors be on a CUDA device: a real one, or one that computes nothing.

    Args:
        capability: that the fake one says it has.

    Yields:
        Whether it is real.
    """
    if torch.cuda.is_available():
        yield True
        return
    with contextlib.ExitStack() as stack:
        for name, value in pretended(capability).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        exchange = load_guard().exchange_device
        exchange()
        stack.callback(exchange)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_AsOnCuda())
        # no mode, which the backward pass is out of, where layers may be computed a second time
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attention))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", listed))
        yield False


@contextlib.contextmanager
def counted():
    """Count what a block gives the device to do."""
    with Counts() as counts:
        COUNTING.append(counts)
        yield counts
        COUNTING.remove(counts)


def pretended(capability):
    """Return what torch asks CUDA's library for."""
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], total_memory=80 << 30, multi_processor_count=132
    )
    state = torch.zeros(16, dtype=torch.uint8)
    nothing = {
        name: lambda *args, **kwargs: None for name in ("_lazy_init", "synchronize", "empty_cache", "set_device")
    }
    nothing |= {name: lambda *args, **kwargs: None for name in ("set_rng_state", "manual_seed", "manual_seed_all")}
    return {
        **nothing,
        **dict.fromkeys(("Stream", "Event", "current_stream"), NoStream),
        "stream": lambda stream: contextlib.nullcontext(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_device_capability": lambda *args: capability,
        "get_device_properties": lambda *args: properties,
        "get_device_name": lambda *args: "fake",
        "get_rng_state": lambda *args: state,
        "max_memory_allocated": lambda *args: 0,
        "reset_peak_memory_stats": lambda *args: None,
    }


def load_guard():
    """Return the device guard's library; compiled (two seconds) where it is not there yet."""
    source = HERE / "guard.cpp"
    known = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"fake-cuda-{known}.so"
    torch_folder = Path(torch.__file__).parent
    if not library.is_file():
        flags = ["-std=c++20", "-O0", "-w", "-fPIC", "-shared", f"-I{torch_folder / 'include'}"]
        with tempfile.NamedTemporaryFile(dir=library.parent, suffix=".so", delete=False) as new:
            subprocess.run(["g++", *flags, str(source), "-o", new.name], check=True)
        Path(new.name).replace(library)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder / "lib" / name), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))
