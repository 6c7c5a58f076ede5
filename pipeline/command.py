"""``python -m pipeline generate``: a file of prompts to Parquet files of rollouts.

Exit codes: 0, everything is done; 1, some requests were refused or aborted, and the summary says why; 2, bad arguments
or files, with the reason on stderr; 130, interrupted: what had finished is written.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from pipeline.arguments import add_options, given
from pipeline.batch import ShardWriter, new_folder, run
from pipeline.grammars.grammar import Grammar
from pipeline.lengths import ConfidenceThreshold
from pipeline.params import NO_TEXT_FORM, SamplingParams
from pipeline.pipeline import SpeculativePipeline
from pipeline.prompt_file import PromptLine, read_prompts
from pipeline.state import Options
from pipeline.summary import Summary

DONE, SOME_FAILED, BAD_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
        arguments: Without the program's name; None: the process's own.

    Raises:
        SystemExit: With code 2 for arguments that argparse refuses; with 0 after ``--help``.
    """
    options = make_parser().parse_args(arguments)
    try:
        pipe, lines, writer = prepare(options)
    except (ValueError, OSError) as error:
        return _refuse(error)
    try:
        return generate(pipe, lines, writer, progress=options.progress)
    except OSError as error:
        return _refuse(error)


def _refuse(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return BAD_ARGUMENTS


def make_parser() -> argparse.ArgumentParser:
    """The options; those of sampling and of the pipeline are made from `SamplingParams` and `Options`."""
    codes = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(prog="python -m pipeline", description="Batch generation with exact records.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser(
        "generate",
        help="generate for a file of prompts",
        description="Generate for a file of prompts and write the rollouts to Parquet files.",
        epilog=codes,
        allow_abbrev=False,
    )
    command.add_argument("--target", required=True, help='"demo", a hub name, a local folder or a GGUF file')
    command.add_argument(
        "--draft",
        help='"demo", "ngram" (prompt lookup), a hub name or a local folder (default: none, ordinary decoding)',
    )
    command.add_argument(
        "--prompts",
        required=True,
        type=Path,
        metavar="FILE",
        help='JSONL; a line has "prompt", "messages" or "token_ids", and may have "params" of its own and an "id"',
    )
    command.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="for the Parquet files; new or empty"
    )
    command.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    command.add_argument(
        "--shard-size", type=int, default=1024, metavar="INTEGER", help="rollouts a file, at least (default: 1024)"
    )
    command.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, help="show a bar (default: if stderr is a terminal)"
    )
    add_options(command, Options, title="pipeline", readers={"draft_lengths": ("THRESHOLD", _threshold)})
    add_options(
        command,
        SamplingParams,
        title="sampling",
        without=NO_TEXT_FORM,
        readers={"grammar": ("KIND=TEXT", _grammar)},
    )
    return parser


def _threshold(text: str) -> ConfidenceThreshold:
    """The one rule for lengths that a number gives."""
    try:
        return ConfidenceThreshold(float(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _grammar(text: str) -> Grammar:
    """``regex=...``, ``ebnf=...`` or ``json_schema=...``."""
    kind, _, source = text.partition("=")
    try:
        return Grammar.of({kind: source})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def prepare(options: argparse.Namespace) -> tuple[SpeculativePipeline, list[PromptLine], ShardWriter]:
    """Check everything that can be checked without the models, then load them.

    Raises:
        ValueError: A value or a prompts file that can't be used (an `InvalidRequest`), or a checkpoint that doesn't
            load (a `CheckpointError`).
        OSError: A file or folder that can't be read or written.
    """
    if options.shard_size < 1:
        raise ValueError(f"shard_size={options.shard_size}, expected at least 1")
    pipeline_options = given(options, Options)
    Options.checked(pipeline_options)
    lines = read_prompts(options.prompts, SamplingParams(**given(options, SamplingParams)))
    new_folder(options.out)
    pipe = SpeculativePipeline.from_pretrained(
        options.target, options.draft, device=options.device, dtype=options.dtype, **pipeline_options
    )
    source = {"name": options.prompts.name, "sha256": hashlib.sha256(options.prompts.read_bytes()).hexdigest()}
    return pipe, lines, ShardWriter(options.out, pipe, options.shard_size, {"prompts": source})


def generate(
    pipe: SpeculativePipeline, lines: Sequence[PromptLine], writer: ShardWriter, *, progress: bool | None = None
) -> int:
    """Generate for all lines, write what finishes, print the summary; returns the exit code.

    Args:
        progress: Show a bar of finished requests on stderr; None: if that is a terminal.

    Raises:
        OSError: A file that can't be written.
    """
    summary, started, code = Summary(), time.perf_counter(), DONE
    hidden: Any = None if progress is None else not progress  # tqdm's None: hidden where there is no terminal
    with tqdm(total=sum(line.params.n for line in lines), disable=hidden, unit="request") as bar:
        try:
            for line, rollouts in run(pipe, lines):
                writer.add(line, rollouts)
                summary.add(rollouts, f"line {line.number}" if line.id is None else line.id)
                bar.update(len(rollouts))
                rate = summary.num_tokens / (time.perf_counter() - started)
                bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        except KeyboardInterrupt:
            code = INTERRUPTED
        finally:
            writer.flush()
    print("\n".join(summary.lines(time.perf_counter() - started)))
    for path in writer.paths:
        print(f"written         {path}")
    return code or (SOME_FAILED if summary.num_failed else DONE)
