"""deepinfer-sm86 serve, generate, inspect, quantize, eval, tune, plan, doctor: parses, hands over.

Knows what the commands are called; what they do is imported only when one is run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Any

from serve_app import __version__
from serve_app.cli_inspect import add_inspect, inspect
from serve_app.cli_options import add_model_options, args_of
from serve_app.cli_plan import add_plan, plan
from serve_app.cli_quantize import add_eval, add_quantize, evaluate, quantize
from serve_app.cli_tune import add_tune, tune

READER_GONE = 141
"""Exit code of a program that the signal of a closed pipe has ended."""


def build_parser() -> argparse.ArgumentParser:
    """All commands and flags."""
    parser = argparse.ArgumentParser(
        prog="deepinfer-sm86", description="Serve a low-bit language model behind Ray Serve."
    )
    parser.add_argument("--version", action="version", version=f"deepinfer-sm86 {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    serve = commands.add_parser("serve", help="start the HTTP server; Ctrl-C drains and stops it")
    add_model_options(serve)
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8000)

    generate = commands.add_parser("generate", help="print a completion, in this process, no Ray")
    add_model_options(generate)
    generate.add_argument("prompt", nargs="?", help="default: read from stdin")
    generate.add_argument("--chat", action="store_true", help="use the model's chat template")
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--stop", action="append", help="end before this text; up to four")

    add_inspect(commands)
    add_quantize(commands)
    add_eval(commands)
    add_tune(commands)
    add_plan(commands)

    doctor = commands.add_parser("doctor", help="what this machine can do and what would be chosen")
    add_model_options(doctor)
    doctor.add_argument("--json", action="store_true", help="for machines")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors of ours are one line on stderr."""
    from configs.load import ConfigError

    options = build_parser().parse_args(argv)
    if isinstance(sys.stdout, TextIOWrapper):  # a text may hold what the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    commands = {
        "serve": _serve,
        "generate": _generate,
        "inspect": inspect,
        "quantize": quantize,
        "eval": evaluate,
        "tune": tune,
        "plan": plan,
        "doctor": _doctor,
    }
    run = commands[options.command]
    try:
        code = run(options)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has seen enough, as `head` does
        sys.stdout = None  # or its last flush would fail as well
        return READER_GONE
    except Exception as error:
        if _is_ours(error):
            return _failed(error)
        raise


def _is_ours(error: Exception) -> bool:
    """True for errors whose message is written for the user."""
    from engine_actor.errors import EngineError
    from serve_app.protocol.errors import ApiError

    return isinstance(error, EngineError | ApiError)


def _failed(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 1


def _serve(options: argparse.Namespace) -> int:
    from serve_app.serve_command import serve

    return serve(args_of(options), options.host, options.port)


def _doctor(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from serve_app.doctor import examine, render

    findings = examine(args_of(options))
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print(render(findings))
    return int(any(finding.level == "problem" for finding in findings))


def _generate(options: argparse.Namespace) -> int:
    from serve_app.local import generate_locally

    prompt = options.prompt if options.prompt is not None else sys.stdin.read()
    asyncio.run(generate_locally(args_of(options), request_of(options, prompt), _write))
    print()
    return 0


def _write(text: str) -> None:
    print(text, end="", flush=True)


def request_of(options: argparse.Namespace, prompt: str) -> dict[str, Any]:
    """The request body that HTTP would carry."""
    body: dict[str, Any] = {
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
    }
    if options.seed is not None:
        body["seed"] = options.seed
    if options.stop:
        body["stop"] = options.stop
    if options.chat:
        return body | {"messages": [{"role": "user", "content": prompt}]}
    return body | {"prompt": prompt}


if __name__ == "__main__":
    sys.exit(main())
