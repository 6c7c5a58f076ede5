"""``python -m pipeline generate``: a file of prompts to Parquet files of rollouts, as a job that can be gone on with.

Exit codes: 0, everything is done; 1, some requests were refused or aborted, and the summary says why; 2, bad arguments
or files, a full disk among them, with the reason on stderr; 130, interrupted by Ctrl-C or SIGTERM. After 2 and 130, and
after a kill, the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from model_loaders.drafts.finding import demo_names
from pipeline.cli.arguments import add_options, given
from pipeline.drafting.draft_choice import LOOKUP
from pipeline.drafting.lengths import ConfidenceThreshold
from pipeline.grammars.grammar import Grammar
from pipeline.jobs import Job
from pipeline.jobs.job import SHARD_SIZE
from pipeline.jobs.on_ray import run_on_ray
from pipeline.options import Options
from pipeline.pipeline import SpeculativePipeline
from pipeline.policy.params import NO_TEXT_FORM, SamplingParams

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
        with _stopped_by_sigterm(), open_job(options) as job:
            return generate(job, options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    except KeyboardInterrupt:  # before there was anything to stop
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """One whose command says what isn't its option, with its own usage and the nearest that is."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            name = unknown[0].partition("=")[0]
            near = get_close_matches(name, self._option_string_actions, 1)
            self.error(f"{name}, expected an option of {self.prog}{f'; did you mean {near[0]}?' if near else ''}")
        return options, unknown


def make_parser() -> argparse.ArgumentParser:
    """The options; those of sampling and of the pipeline are made from `SamplingParams` and `Options`."""
    codes = (__doc__ or "").partition("\n\n")[2]
    parser = _Parser(prog="python -m pipeline", description="Batch generation with exact records.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser(
        "generate",
        help="generate for a file of prompts",
        description="Generate for a file of prompts and write the rollouts to Parquet files; started again, go on.",
        epilog=codes,
        allow_abbrev=False,
    )
    command.add_argument("--target", required=True, help='"demo", a hub name, a local folder or a GGUF file')
    command.add_argument(
        "--draft",
        help=f"{demo_names()}, '{LOOKUP}' (prompt lookup), a hub name or a local folder (default: none)",
    )
    command.add_argument(
        "--prompts",
        required=True,
        type=Path,
        metavar="FILE",
        help='JSONL, or Parquet by the ending .parquet; a line has "prompt", "messages" or "token_ids", and may have '
        '"params" of its own and an "id"',
    )
    command.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="the job's: new, empty, or one to go on with"
    )
    command.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    command.add_argument(
        "--shard-size",
        type=int,
        default=SHARD_SIZE,
        metavar="INTEGER",
        help="samples a file, at least, and the most that a kill costs of finished ones (default: %(default)s)",
    )
    command.add_argument(
        "--workers",
        type=int,
        metavar="INTEGER",
        help="pipelines at once, on Ray (extra ray), with a GPU each or, with --device cpu, a core each "
        "(default: one, in this process)",
    )
    command.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show a bar with rate and time left (default: if stderr is a terminal)",
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


def open_job(options: argparse.Namespace) -> Job:
    """Check everything that can be checked without the models.

    Raises:
        InvalidRequest: A value, a prompts file or a folder that can't be used.
        OSError: A file or folder that can't be read or made.
    """
    Options(**given(options, Options))
    params = SamplingParams(**given(options, SamplingParams))
    return Job(options.out, options.prompts, params, shard_size=options.shard_size)


def generate(job: Job, options: argparse.Namespace) -> int:
    """Load the models, go on with the job, print its summary; returns the exit code.

    Raises:
        ValueError: A checkpoint that doesn't load (a `CheckpointError`), or isn't the one that the job was started with
            (an `InvalidRequest`).
        OSError: A file that can't be written.
    """
    names = ("target", "draft", "device", "dtype")
    load = {name: getattr(options, name) for name in names} | given(options, Options)
    pipe = SpeculativePipeline.from_pretrained(**load) if options.workers is None else None
    started, code = time.perf_counter(), DONE
    try:
        if pipe is not None:
            job.run(pipe, progress=options.progress)
        else:
            gpus = 0 if options.device == "cpu" else 1
            run_on_ray(job, load, num_workers=options.workers, gpus_per_worker=gpus, progress=options.progress)
    except KeyboardInterrupt:
        code = INTERRUPTED
    print("\n".join(job.summary.lines(time.perf_counter() - started, job.earlier)))
    num_left = len(job.missing)
    left = f"; {num_left} shards are left: run the same command again" if num_left else ""
    print(f"written         {len(job.shards) - num_left} files in {options.out}{left}")
    return code or (SOME_FAILED if job.summary.num_failed else DONE)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM, which a scheduler sends before it kills, stops like Ctrl-C; only a main thread can have it so."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
