"""`makeway serve`: an OpenAI-compatible server for one model.

Owns the flags and what a person sees while it starts. Never computes or speaks HTTP. Hazard: stdout stays empty; all
that is said goes to stderr.
"""

import asyncio
import logging
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from makeway.cli import options as o
from makeway.cli.loading import load_engine
from makeway.engine import Engine
from makeway.errors import UserError
from makeway.server.app import Server
from makeway.server.run import listen, serve
from makeway.server.served import Progress
from makeway.server.settings import ServerConfig

SERVER: dict[str, Any] = {f.name: f.default for f in fields(ServerConfig)}


def _option(flag: str, help_text: str) -> Any:
    return typer.Option(flag, help=help_text, rich_help_panel="Server")


def serve_command(
    model: o.ModelArgument,
    host: Annotated[str, _option("--host", "Address to listen on.")] = SERVER["host"],
    port: Annotated[int, _option("--port", "Port to listen on; 0: any free one.")] = SERVER["port"],
    name: Annotated[
        list[str] | None, _option("--name", "What clients call the model; may be repeated. [the file's name]")
    ] = None,
    api_key: Annotated[list[str] | None, _option("--api-key", "A key that clients must send; may be repeated.")] = None,
    api_key_file: Annotated[Path | None, _option("--api-key-file", "A file with one key a line.")] = None,
    max_waiting: Annotated[int, _option("--max-waiting", "Requests that may wait for a place.")] = SERVER[
        "max_waiting"
    ],
    max_body_mib: Annotated[int, _option("--max-body-mib", "Largest request, in MiB.")] = SERVER["max_body_mib"],
    cors_origin: Annotated[
        list[str] | None, _option("--cors-origin", "A web origin whose pages may call, or '*'; may be repeated.")
    ] = None,
    shutdown_s: Annotated[
        float, _option("--shutdown-s", "Seconds that requests may still run after SIGTERM.")
    ] = SERVER["shutdown_s"],
    restart_on_failure: Annotated[
        bool, _option("--restart-on-failure", "Bring the engine back when it fails.")
    ] = SERVER["restart_on_failure"],
    chat_template: Annotated[
        Path | None, _option("--chat-template", "A file with a template to use instead of the model's.")
    ] = None,
    log_requests: Annotated[bool, _option("--log-requests", "One line a request on stderr.")] = False,
    log_prompts: Annotated[bool, _option("--log-prompts", "The text of every prompt, too.")] = SERVER["log_prompts"],
    parallel: o.ParallelOption = o.ENGINE["parallel"],
    device: o.DeviceOption = o.ENGINE["device"],
    kernels: o.KernelsOption = o.ENGINE["kernels"],
    vram: o.VramOption = o.ENGINE["vram"],
    ram: o.RamOption = o.ENGINE["ram"],
    context: o.ContextOption = o.ENGINE["context"],
    kv_type: o.KvTypeOption = o.ENGINE["kv_type"],
    slots: o.SlotsOption = o.ENGINE["slots"],
    policy: o.PolicyOption = o.ENGINE["policy"],
    profile: o.ProfileOption = o.ENGINE["profile"],
    uploads_per_layer: o.UploadsOption = o.ENGINE["uploads_per_layer"],
    guesses: o.GuessesOption = o.ENGINE["guesses"],
    chunk: o.ChunkOption = o.ENGINE["chunk"],
    sweep_tokens: o.SweepTokensOption = o.ENGINE["sweep_tokens"],
    handover: o.HandoverOption = o.ENGINE["handover"],
    drafter: o.DrafterOption = o.ENGINE["drafter"],
    draft_depth: o.DraftDepthOption = o.ENGINE["draft_depth"],
    prefix_ram: o.PrefixRamOption = o.ENGINE["prefix_ram"],
    max_prefill_s: o.MaxPrefillOption = o.ENGINE["max_prefill_s"],
    trace: o.TraceOption = o.ENGINE["trace"],
    audit: o.AuditOption = o.ENGINE["audit"],
) -> None:
    """Serve a model over HTTP in OpenAI's and Anthropic's forms, with a chat page at /."""
    engine_config = o.engine_config(
        vram=vram,
        ram=ram,
        device=device,
        kernels=kernels,
        context=context,
        parallel=parallel,
        kv_type=kv_type,
        slots=slots,
        policy=policy,
        profile=profile,
        uploads_per_layer=uploads_per_layer,
        guesses=guesses,
        chunk=chunk,
        sweep_tokens=sweep_tokens,
        handover=handover,
        drafter=drafter,
        draft_depth=draft_depth,
        prefix_ram=prefix_ram,
        max_prefill_s=max_prefill_s,
        trace=trace,
        audit=audit,
    )
    config = ServerConfig(
        names=tuple(name) if name else (model.stem,),
        host=host,
        port=port,
        api_keys=(*(api_key or ()), *_lines(api_key_file)),
        max_waiting=max_waiting,
        max_body_mib=max_body_mib,
        cors_origins=tuple(cors_origin or ()),
        shutdown_s=shutdown_s,
        restart_on_failure=restart_on_failure,
        chat_template=None if chat_template is None else _text(chat_template, "--chat-template"),
        log_prompts=log_prompts,
    )
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO if log_requests or log_prompts else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
    )
    sock = listen(host, port)
    with sock:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{sock.getsockname()[1]}"
        print(f"makeway: loading {model}", file=sys.stderr, flush=True)

        def load(progress: Progress) -> Engine:
            return load_engine(model, engine_config, console=Console(stderr=True), tell=progress)

        server = Server(config, load)
        if not config.api_keys and host not in ("127.0.0.1", "::1", "localhost"):
            print("makeway: no --api-key: everybody who reaches this port may use the model", file=sys.stderr)

        def on_ready() -> None:
            print(f"makeway: ready on {address} (chat page; API under {address}/v1)", file=sys.stderr, flush=True)

        def stop_at_once(number: int) -> None:
            # The engine thread may be in the middle of a step; waiting for it is what the second signal was against.
            sys.stderr.flush()
            os._exit(128 + number)

        asyncio.run(serve(server, sock, on_ready=on_ready, on_second_signal=stop_at_once))


def _lines(path: Path | None) -> list[str]:
    return [] if path is None else [line.strip() for line in _text(path, "--api-key-file").splitlines() if line.strip()]


def _text(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag} {path}: cannot be read: {error}") from error
