"""The smallest valid checkpoint: an image model with optimizer state and training progress."""

import torch


def _layer(number, outputs, inputs):
    name = f"network.layers.{number}"
    return {f"{name}.weight": torch.ones(1, outputs, inputs), f"{name}.bias": torch.ones(1, outputs)}


def small_checkpoint(num_updates=10, epoch=2, **more):
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": num_updates}
    return {
        "cfg": {"model": {"_name": "alma_mlp"}},
        "model": {**_layer(0, 3, 4), **_layer(1, 3, 3), **_layer(2, 2, 3)},
        "optimizer_history": [history],
        "last_optimizer_state": {"param_groups": [{"params": [0]}], "state": {0: {"moments": torch.ones(1000)}}},
        "extra_state": {"train_iterator": {"epoch": epoch}},
        **more,
    }
