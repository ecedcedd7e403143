"""Trainings by other people's trainers: Lightning, Hugging Face's Trainer, accelerate; and text that a model generates.

`LIBRARY_LOOPS[name](run)` is as in `watched_loops.py`. A name that ends in "_callback" watches by the trainer's callback.
"""

from __future__ import annotations

from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torchvision_ops  # noqa: F401  what the libraries import needs it

# isort: split
import lightning
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader, Dataset
from training_witness import Perceptron, loss_of, vectors
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from watched_loops import Run, sgd, third_step

from replaylens.integrations import LightningCallback, TrainerCallback

LIBRARY_LOOPS: dict[str, Callable[[Run], None]] = {}


def loop(body: Callable[[Run], None]) -> Callable[[Run], None]:
    LIBRARY_LOOPS[body.__name__] = body
    return body


# -- Lightning ---------------------------------------------------------------------------------------------------------


def _fit_by_lightning(run: Run, is_callback: bool, is_manual: bool = False, **options: Any) -> None:
    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.norm = Perceptron(), nn.BatchNorm1d(4)
            self.automatic_optimization = not is_manual

        def training_step(self, batch, index):
            loss = loss_of(self.norm(self.net(batch)))
            run.witness.note(f"loss {len(run.witness.hashes)}", loss)
            if not is_manual:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

        def validation_step(self, batch, index):
            run.witness.note(f"validation {len(run.witness.hashes)}", self.net(batch))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01)

    module = Module()
    callbacks = []
    if is_callback and run.kind != "plain":
        callbacks = [LightningCallback(**wishes_of_callback(run))]
    if not is_manual:
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, **options}
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        default_root_dir=run.folder,
        **options,
    )
    data, held_out = torch.randn(6 * 8, 16), torch.randn(8, 16)
    loaders = DataLoader(data, 8, shuffle=True), DataLoader(held_out, 8)
    if is_callback:
        trainer.fit(module, *loaders)
        run.watches += [callback.watch for callback in callbacks]
    else:
        with run.watch(module):
            trainer.fit(module, *loaders)
    run.end(module, *trainer.optimizers)


def wishes_of_callback(run: Run) -> dict[str, Any]:
    if run.kind == "when":
        return {"when": third_step, "folder": run.folder}
    return {"layers": ["", "**"], "every": 2, "what": "all", "sink": []}


@loop
def lightning_trainer(run: Run) -> None:
    _fit_by_lightning(run, False)


@loop
def lightning_callback(run: Run) -> None:
    _fit_by_lightning(run, True)


@loop
def lightning_by_hand(run: Run) -> None:
    _fit_by_lightning(run, False, is_manual=True)


@loop
def lightning_half(run: Run) -> None:
    _fit_by_lightning(run, False, precision="bf16-mixed")


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def _language_model() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=31)
    )


class Texts(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.index = torch.randint(0, 32, (24, 10))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.index[at], "labels": self.index[at], "other": self.index[at]}


def _fit_by_trainer(run: Run, is_callback: bool, **options: Any) -> None:
    model = _language_model()
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            max_grad_norm=0.1,
            learning_rate=0.01,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            eval_strategy="steps",
            eval_steps=3,
            logging_strategy="no",
            **options,
        )
        callbacks = []
        if is_callback and run.kind != "plain":
            callbacks = [TrainerCallback(**wishes_of_callback(run))]
        trainer = Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=callbacks)
        if is_callback:
            trainer.train()
            run.watches += [callback.watch for callback in callbacks]
        else:
            with run.watch(model):
                trainer.train()
        run.witness.note("evaluation", trainer.evaluate()["eval_loss"])
        run.end(model, trainer.optimizer.optimizer)


@loop
def hugging_face_trainer(run: Run) -> None:
    _fit_by_trainer(run, False)


@loop
def hugging_face_callback(run: Run) -> None:
    _fit_by_trainer(run, True)


@loop
def hugging_face_checkpointed(run: Run) -> None:
    _fit_by_trainer(run, False, gradient_checkpointing=True, bf16=True)


@loop
def generated_text(run: Run) -> None:
    model = _language_model().eval()
    with run.watch(model, clock="forward"):
        index = model.generate(torch.tensor([[1, 2, 3]]), do_sample=True, max_new_tokens=12, pad_token_id=0)
    run.witness.note("tokens", index)
    run.end(model)


# -- accelerate --------------------------------------------------------------------------------------------------------


def _fit_by_accelerate(run: Run, precision: str) -> None:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = Perceptron()
    optimizer = sgd(model)
    loader = DataLoader(torch.randn(80, 16), 8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with run.watch(model):
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(x)))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    run.witness.note("own", sorted(set(vars(model)) - {"_compiled_call_impl"}))
    run.end(accelerator.unwrap_model(model), optimizer.optimizer)
    AcceleratorState._reset_state(True)


@loop
def accelerated(run: Run) -> None:
    _fit_by_accelerate(run, "no")


@loop
def accelerated_half(run: Run) -> None:
    _fit_by_accelerate(run, "bf16")


@loop
def compiled_by_inductor(run: Run) -> None:
    """With kernels that a C compiler makes."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    compiled = torch.compile(model)
    with_weights = {"layers": ["**"], "what": ("weight", "weight_grad", "update"), "why_no_nodes": "compile"}
    optimizer = sgd(model)
    with run.watch(compiled, **with_weights):
        for number in range(6):
            run.step(model, optimizer, loss_of(compiled(*vectors(number))))
    run.end(model, optimizer)
    torch._dynamo.reset()
