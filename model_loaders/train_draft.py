"""Train a draft for a target: ``python -m model_loaders.train_draft --target demo --output FOLDER``.

The target writes its own training text (answers to prompts that it writes too, and to those of --prompts), a
draft learns to foresee it from the target's hidden states, and the report says how many tokens a round the
draft then yields. FOLDER gets the checkpoint (config.json, model.safetensors), log.jsonl, acceptance.json,
and in training/ the texts and the state that --resume goes on from.

--method dflash, dspark, or dflash2: DFlash with a selector of --selector-rank over its --selector-top-k likeliest
tokens, and with convolutions if --conv-kernel-size and --conv-group-size say so. With --start-from a DFlash draft it
begins as that draft, and with --freeze-backbone trains the selector alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from model_loaders.drafts.backbone import FULL, DraftConfig
from model_loaders.drafts.checkpoint import DSPARK_LAYOUTS, METHODS, load_draft, save_draft
from model_loaders.drafts.dflash2 import DFlash2Config
from model_loaders.drafts.dspark import MARKOV_HEADS, VANILLA, DSparkConfig
from model_loaders.drafts.finding import find_draft
from model_loaders.drafts.formats.zlab import default_layer_ids
from model_loaders.errors import CheckpointError
from model_loaders.targets import load_target
from model_loaders.training.acceptance import count_rounds
from model_loaders.training.dataset import Text, load_texts, save_texts
from model_loaders.training.loss import LossWeights
from model_loaders.training.prompts import from_file, mixed, prompt_ids, read_prompts, self_written
from model_loaders.training.trainer import Trainer, TrainingOptions, check_start
from model_loaders.training.writing import Writer

FEWEST_TEXTS = 8
"""To train on, and to hold out a quarter."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status; errors in what was asked for are printed, not raised."""
    args = parser().parse_args(arguments)
    try:
        run(args)
    except CheckpointError as error:
        print(f"train_draft: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    p = argparse.ArgumentParser(prog="python -m model_loaders.train_draft", description=__doc__.split("\n\n")[0])
    p.add_argument("--target", required=True, help='"demo", a folder, a GGUF file or a hub name')
    p.add_argument("--revision", help="of a target on the hub")
    p.add_argument("--method", default="dflash", choices=["dflash", "dspark", "dflash2"])
    p.add_argument("--output", required=True, type=Path, metavar="FOLDER")
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", default="auto", help="of the target and of the draft's forward")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--resume", action="store_true", help="go on from FOLDER's training state and texts")

    text = p.add_argument_group("training text")
    text.add_argument("--texts", type=Path, metavar="FILE", help="use a texts.safetensors written before")
    text.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts to answer too, each once a temperature: evenly among the self-written ones, which fill --samples",
    )
    text.add_argument("--only-prompts", action="store_true", help="answer those of --prompts alone")
    text.add_argument("--samples", type=int, default=40_000, help="texts to write, at most")
    text.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="of the answers, in turn")
    text.add_argument("--max-length", type=int, default=640, help="tokens of a text, its prompt included")
    text.add_argument("--slots", type=int, default=1024, help="texts written side by side")
    text.add_argument("--write-seconds", type=float, help="stop writing after this time")
    text.add_argument("--held-out", type=int, default=256, help="texts kept out of training, for the report")

    shape = p.add_argument_group("the draft")
    shape.add_argument(
        "--start-from",
        metavar="DRAFT",
        help="a draft to begin with, of the same shape and with no embedding or head of its own; its MLPs may be "
        "narrower, and dflash2 may begin with dflash",
    )
    shape.add_argument(
        "--freeze-backbone", action="store_true", help="of dflash2, with --start-from: train the selector alone"
    )
    shape.add_argument("--layers", type=int, default=3)
    shape.add_argument("--intermediate-size", type=int, help="default: the target's")
    shape.add_argument("--block-size", type=int, help="rows of a block: default 8 (7 drafts), of dspark 7 (7 drafts)")
    shape.add_argument("--markov-rank", type=int, default=64, help="of dspark; 0: no Markov head")
    shape.add_argument("--markov-head", choices=MARKOV_HEADS, default=VANILLA, help="of dspark")
    shape.add_argument("--selector-rank", type=int, default=64, help="of dflash2")
    shape.add_argument("--selector-top-k", type=int, default=64, help="of dflash2: candidates of a draft")
    shape.add_argument("--conv-kernel-size", type=int, default=0, help="of dflash2: taps along a block; default: none")
    shape.add_argument("--conv-group-size", type=int, default=0, help="of dflash2: channels that share what a row adds")
    shape.add_argument("--target-layer-ids", type=int, nargs="+", help="default: five, evenly spread")
    shape.add_argument("--mask-token", help="default: an unused special token of the target")

    loop = p.add_argument_group("training")
    loop.add_argument("--steps", type=int, default=4000)
    loop.add_argument("--train-seconds", type=float, help="choose --steps to take about this long, timed first")
    loop.add_argument("--batch", type=int, default=32, help="texts a step")
    loop.add_argument("--anchors", type=int, default=64, help="blocks a text")
    loop.add_argument("--learning-rate", type=float, default=6e-4)
    loop.add_argument("--gamma", type=float, default=4.0, help="decay of the loss weights over a block")
    loop.add_argument("--cross-entropy", type=float, help="weight in the loss; default 0.1, of dflash 1")
    loop.add_argument("--distance", type=float, help="weight of |P - Q|_1 in the loss; default 0.9, of dflash 0")
    loop.add_argument(
        "--unary", type=float, help="of dflash2: share of the loss without the selector; default 0.5, frozen 0"
    )
    loop.add_argument("--compiled", action="store_true", help="fuse the loss by torch.compile")
    loop.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    loop.add_argument("--stop-after", type=float, metavar="SECONDS", help="stop training here; --resume goes on")

    stored = p.add_argument_group("the checkpoint")
    stored.add_argument("--int8", action="store_true", help="store the matrices as int8 with a scale a row")
    stored.add_argument(
        "--layout",
        choices=DSPARK_LAYOUTS,
        help="of dspark; default: specforge, the smaller one: deepspec has copies of the target's embedding and head",
    )

    report = p.add_argument_group("report")
    report.add_argument(
        "--measure", type=Path, nargs="*", default=[], metavar="FILE", help="prompt files to measure on"
    )
    report.add_argument("--measure-prompts", type=int, default=20, help="prompts of each file")
    report.add_argument("--measure-tokens", type=int, default=128, help="new tokens of each prompt")
    return p


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Write, train, export and measure. Returns what acceptance.json holds."""
    check_options(args)
    start = find_draft(args.start_from) if args.start_from else None  # before the target, which takes longer
    target = load_target(args.target, device=args.device, dtype=args.dtype, revision=args.revision)
    config = draft_config(args, target)
    begun = load_draft(start, target, dtype=torch.float32) if start else None
    if begun:
        check_start(begun, config)
    texts = written_texts(args, target)
    held = min(args.held_out, len(texts) // 4)
    options = TrainingOptions(
        steps=args.steps, batch=args.batch, anchors=args.anchors, length=args.max_length,
        learning_rate=args.learning_rate, loss=loss_weights(args), seed=args.seed, every=args.every,
        compiled=args.compiled, freeze_backbone=args.freeze_backbone,
    )  # fmt: skip
    if args.train_seconds:
        options = replace(options, steps=fitting_steps(args, target, config, texts[held:], options))
    trainer = Trainer(target, config, texts[held:], texts[:held], options, args.output)
    if begun:
        trainer.start_from(begun)
    if args.resume and trainer.resume():
        print(f"resumed at step {trainer.step}", flush=True)
    export(trainer, args.int8, args.layout)
    started = time.monotonic()
    done = trainer.train(seconds=args.stop_after, on_checkpoint=lambda: export(trainer, args.int8, args.layout))
    print(f"step {trainer.step} of {options.steps}, {time.monotonic() - started:.0f} s", flush=True)
    export(trainer, args.int8, args.layout)
    report = measure(args, target, texts[:held])
    report["training"] = {
        "steps": trainer.step, "finished": done, "texts": len(texts) - held,
        "tokens": sum(len(text.tokens) for text in texts), "options": asdict(options),
        "held_out": trainer.evaluate(), "target": args.target, "target_sha256": target.sha256,
    }  # fmt: skip
    path = args.output / "acceptance.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print_report(report)
    return report


def check_options(args: argparse.Namespace) -> None:
    """Raise CheckpointError for options that can't be, or don't go together."""
    dflash2 = args.method == "dflash2"
    if args.samples < FEWEST_TEXTS and not (args.texts or args.resume):
        raise CheckpointError(f"--samples={args.samples}, expected at least {FEWEST_TEXTS}")
    if args.held_out < 1:
        raise CheckpointError(f"--held-out={args.held_out}, expected at least 1: the report measures on them")
    if args.only_prompts and not args.prompts:
        raise CheckpointError("--only-prompts without --prompts, expected the file of prompts to answer")
    if args.layout and args.method != "dspark":
        raise CheckpointError(f"--layout={args.layout} with --method {args.method}, expected dspark: others have one")
    fewest_rows = 1 if args.method == "dspark" else 2
    if args.block_size is not None and args.block_size < fewest_rows:
        raise CheckpointError(f"--block-size={args.block_size}, expected at least {fewest_rows} for {args.method}")
    if args.freeze_backbone and not (dflash2 and args.start_from):
        raise CheckpointError(
            f"--freeze-backbone with --method {args.method}, --start-from {args.start_from}: expected dflash2 and the "
            "draft that a selector is trained for"
        )
    if not dflash2:
        return
    for name, lowest in (("selector_rank", 1), ("selector_top_k", 2), ("conv_kernel_size", 0), ("conv_group_size", 0)):
        if (value := getattr(args, name)) < lowest:
            raise CheckpointError(f"--{name.replace('_', '-')}={value}, expected at least {lowest}")
    if bool(args.conv_kernel_size) != bool(args.conv_group_size):
        raise CheckpointError(
            f"--conv-kernel-size={args.conv_kernel_size} with --conv-group-size={args.conv_group_size}, expected both "
            "or neither"
        )
    if args.unary is not None and not 0 <= args.unary <= 1:
        raise CheckpointError(f"--unary={args.unary}, expected a share from 0 to 1")


def loss_weights(args: argparse.Namespace) -> LossWeights:
    """The weights of the loss's terms: the command line's, or the method's own."""
    cross_entropy, distance = (1.0, 0.0) if args.method == "dflash" else (0.1, 0.9)
    unary = 0.0 if args.freeze_backbone else 0.5  # of a frozen backbone's logits it is a constant
    return LossWeights(
        cross_entropy if args.cross_entropy is None else args.cross_entropy,
        distance if args.distance is None else args.distance,
        args.gamma,
        unary if args.unary is None else args.unary,
    )


def fitting_steps(
    args: argparse.Namespace, target: Any, config: DraftConfig, texts: list[Text], options: TrainingOptions
) -> int:
    """How many steps fit in --train-seconds, by timing some steps of a trainer that is thrown away."""
    if args.resume:
        raise CheckpointError("--train-seconds with --resume: give --steps as the first run printed it")
    trial = Trainer(target, config, texts, [], options, args.output)
    for step in range(30):
        if step == 10:
            float(trial.module.norm.weight.detach().sum())  # wait for the device: the first steps compile and allocate
            started = time.monotonic()
        trial.one_step()
    float(trial.module.norm.weight.detach().sum())
    steps = max(1, round(args.train_seconds / ((time.monotonic() - started) / 20)))
    print(f"--steps {steps} fit in {args.train_seconds:.0f} s", flush=True)
    return steps


def written_texts(args: argparse.Namespace, target: Any) -> list[Text]:
    """The texts to train on: read from --texts or an earlier run, or written now and kept."""
    path = args.texts or args.output / "training" / "texts.safetensors"
    if args.texts or (args.resume and path.exists()):
        return load_texts(path)
    if target.tokenizer is None:
        raise CheckpointError(f"target {args.target} has no tokenizer, which writing text needs; pass --texts")
    temperatures, count = tuple(args.temperatures), args.samples
    plans = self_written(target, args.seed, temperatures)
    if args.prompts:
        given = from_file(target, args.prompts, args.seed, temperatures)
        if args.only_prompts:
            count = min(count, len(given))
        plans = mixed(given, plans, count)
    slots = min(args.slots, count)
    writer = Writer(target, slots=slots, max_length=args.max_length, seed=args.seed)
    texts = writer.write(plans, count, time_limit=args.write_seconds)
    if len(texts) < FEWEST_TEXTS:
        fewer = "the number of prompts" if args.only_prompts else "--samples"
        short = "--write-seconds" if args.write_seconds else fewer
        raise CheckpointError(f"only {len(texts)} texts were written, expected at least {FEWEST_TEXTS}; raise {short}")
    # Texts come in the order in which they end, short ones first: held-out ones must be like the rest.
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(args.seed)).tolist()
    texts = [texts[i] for i in order]
    save_texts(path, texts)
    return texts


def draft_config(args: argparse.Namespace, target: Any) -> DraftConfig:
    """The draft's shape: the target's attention shape and RoPE base, and what the command line says."""
    source = target.config
    heads = source.num_attention_heads
    rope = getattr(source, "rope_parameters", None) or {}
    dspark = args.method == "dspark"
    fields: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": args.intermediate_size or source.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(source, "num_key_value_heads", None) or heads,
        "head_dim": getattr(source, "head_dim", None) or target.hidden_size // heads,
        "layer_types": (FULL,) * args.layers,
        "target_layer_ids": tuple(args.target_layer_ids or spread_layer_ids(target.num_layers)),
        "num_target_layers": target.num_layers,
        "block_size": args.block_size or (7 if dspark else 8),
        "mask_token_id": mask_token_id(args.mask_token, target),
        "rope": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10000.0)},
        "max_position_embeddings": target.max_position or 32768,
        "vocab_size": target.vocab_size,
    }
    if args.method == "dflash":
        return DraftConfig(**fields)
    if args.method == "dflash2":
        if args.conv_group_size and target.hidden_size % args.conv_group_size:
            raise CheckpointError(
                f"--conv-group-size={args.conv_group_size}, expected a divisor of hidden_size={target.hidden_size}"
            )
        return DFlash2Config(
            **fields,
            selector_rank=args.selector_rank,
            selector_top_k=args.selector_top_k,
            conv_kernel_size=args.conv_kernel_size,
            conv_group_size=args.conv_group_size,
        )
    return DSparkConfig(
        **fields,
        markov_rank=args.markov_rank,
        markov_head_type=args.markov_head,
        confidence_head=True,
        confidence_with_markov=args.markov_rank > 0,
    )


def spread_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """Five layers by z-lab's rule; of a target with few layers, all but the last."""
    if num_target_layers < 9:
        return tuple(range(max(1, num_target_layers - 1)))
    return default_layer_ids(5, num_target_layers)


def mask_token_id(token: str | None, target: Any) -> int:
    """The id of the given token, or of the last special token that neither the template nor the texts use."""
    tokenizer = target.tokenizer
    if token is not None:
        vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
        if token not in vocabulary:
            raise CheckpointError(f"--mask-token {token!r} is not in the target's vocabulary")
        return vocabulary[token]
    if tokenizer is None:
        return target.vocab_size - 1
    template = tokenizer.chat_template or ""
    named = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    added = sorted(tokenizer.added_tokens_decoder.items())
    free = [i for i, t in added if t.special and t.content not in named and t.content not in template]
    usable = [i for i in free if i < target.vocab_size and i not in target.eos_token_ids]
    return usable[-1] if usable else target.vocab_size - 1


def export(trainer: Trainer, int8: bool, layout: str | None = None) -> None:
    """Write the module in the target's dtype, or int8, as a checkpoint that load_draft reads."""
    draft = METHODS[type(trainer.config)][1](trainer.result(), trainer.target)
    save_draft(trainer.folder, draft, dtype=trainer.dtype, int8=int8, layout=layout)


def measure(args: argparse.Namespace, target: Any, held_out: Sequence[Text]) -> dict[str, Any]:
    """Tokens a round of the exported draft on held-out prompts and prompt files, and with wrong features."""
    draft = load_draft(str(args.output), target)
    sets: dict[str, list[list[int]]] = {
        "held_out": [text.tokens[: text.answer_start].tolist() for text in held_out[: args.measure_prompts]]
    }
    for path in args.measure:
        asked = read_prompts(path)[: args.measure_prompts]
        sets[path.stem] = [prompt_ids(target, text) for text in asked]
    sets = {name: prompts for name, prompts in sets.items() if prompts}
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "T=1": {"temperature": 1.0},
        "T=1, drafts sampled": {"temperature": 1.0, "proposal": "sample"},
        "T=1, top_k 64, top_p 0.95": {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        "T=1, top_k 64, top_p 0.95, drafts sampled": {
            "temperature": 1.0,
            "top_k": 64,
            "top_p": 0.95,
            "proposal": "sample",
        },
        "greedy, shuffled features": {"temperature": 0.0, "shuffle_features": True},
    }
    everything = [prompt for prompts in sets.values() for prompt in prompts]
    results: dict[str, Any] = {}
    for way, how in ways.items():
        rounds = count_rounds(target, draft, everything, max_new_tokens=args.measure_tokens, seed=args.seed, **how)
        per_set, begin = {}, 0
        for name, prompts in sets.items():
            per_set[name] = round(rounds.part(slice(begin, begin + len(prompts))), 3)
            begin += len(prompts)
        files = [per_set[path.stem] for path in args.measure]
        results[way] = {
            "tokens_per_round": per_set,
            "mean_of_files": round(sum(files) / len(files), 3) if files else None,
            "first_k_accepted": [round(x, 4) for x in rounds.by_position],
            "rounds": int(rounds.rounds.sum()),
        }
    return {
        "block_size": draft.block_size,
        "prompts_per_set": args.measure_prompts,
        "new_tokens": args.measure_tokens,
        "results": results,
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu",
        "dtype": str(target.dtype).removeprefix("torch."),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "draft_sha256": draft.sha256,
    }  # fmt: skip


def print_report(report: dict[str, Any]) -> None:
    """The acceptance table: tokens a round (bonus included) of each set and way."""
    names = list(report["results"]["greedy"]["tokens_per_round"])
    print(f"tokens a round, block {report['block_size']}, {report['new_tokens']} new tokens")
    print(f"{'':26}" + "".join(f"{name[:10]:>11}" for name in [*names, "mean"]))
    for way, row in report["results"].items():
        cells = [*row["tokens_per_round"].values(), row["mean_of_files"] or 0.0]
        print(f"{way:26}" + "".join(f"{cell:11.2f}" for cell in cells))
        print(f"{'':26} first k accepted: " + " ".join(f"{x:.3f}" for x in row["first_k_accepted"]))


if __name__ == "__main__":
    sys.exit(main())
