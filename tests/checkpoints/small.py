"""The smallest content of a checkpoint that is read: one image model, what it was trained with and how far."""

import torch


def small_checkpoint(num_updates=10, epoch=2, **more):
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": num_updates}
    return {
        "cfg": {"model": {"_name": "alma_mlp"}},
        "model": {"network.w": torch.ones(3)},
        "optimizer_history": [history],
        "last_optimizer_state": {"param_groups": [{"params": [0]}], "state": {0: {"moments": torch.ones(1000)}}},
        "extra_state": {"train_iterator": {"epoch": epoch}},
        **more,
    }
