"""Lightning's Trainer, which gives the optimizer a closure: DistributedDataParallel."""

import lightning.pytorch as L
import torch
from tests.contract.processes.watching import loss_of
from tests.contract.processes.wrapped import batch, llama
from tests.integrations.trainers.run import (
    BATCH,
    CLIP,
    STEPS,
    outcome,
    rank,
    world,
)
from tests.training import adamw

import qkeel
from qkeel.integrations.lightning import QkeelCallback


class Module(L.LightningModule):
    """The language model; the clip is applied with the optimizer."""

    def __init__(self):
        super().__init__()
        self.model = llama()
        self.sites = qkeel.find_sites(self.model, batch(0)[:1])

    def training_step(self, tokens, index):
        return loss_of(self.model, tokens)

    def configure_optimizers(self):
        return adamw(self, 0.01, eps=1e-05)

    def on_fit_start(self):
        qkeel.apply(self.model, CLIP, self.trainer.optimizers[0], sites=self.sites)


def train(variant, folder):
    module, watching = Module(), QkeelCallback(every=1)
    tokens = torch.cat([batch(step).chunk(world())[rank()] for step in range(STEPS)])
    several = {"devices": world(), "strategy": "ddp"} if world() > 1 else {"devices": 1}
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="64-true",
        callbacks=[watching],
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **several,
    )
    loader = torch.utils.data.DataLoader(tokens, batch_size=BATCH // world())
    trainer.fit(module, loader)
    return outcome(module.model, watching.monitor)
