"""Checks of a model and of a GPU for `meshllm doctor`, which need torch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from blake3 import blake3

from meshllm.cli.doctor.finding import Finding, Verdict
from meshllm.cli.terminal.render import bytes_of
from meshllm.config import Settings, cache_path
from meshllm.errors import MeshError, ModelError
from meshllm.model import device
from meshllm.model.files.manifest import manifest
from meshllm.model.files.source import resolve, stored_dtype
from meshllm.model.parity.verdict import known_verdicts
from meshllm.model.text.tokenizer import Text
from meshllm.names import Quant


def examine_model(chosen: Settings) -> Iterator[Finding]:
    """Check model, weights and execution."""
    yield (model := check_model(chosen.model))
    if model.verdict != "fail":
        yield check_weights(chosen.model, cache_path())
        yield check_execution(chosen)


def check_gpu(wanted: str) -> Finding | None:
    """Report the GPU that a float32 model would use; None if that is the CPU."""
    try:
        found = device.choose(wanted, torch.float32)
    except MeshError as error:
        return Finding("fail", "device", str(error), error.hint or "")
    if found == device.CPU:
        return None
    gpu = f"{device.name_of(found)}, {bytes_of(device.free_bytes(found))} free"
    if lacking := device.missing_for_cuda_graphs():
        return Finding("warn", "device", f"{gpu}, slow without {lacking}", "install it")
    return Finding("ok", "device", gpu)


def check_model(name: str) -> Finding:
    """Check that the model is on this machine and that its type can be split."""
    try:
        source = resolve(name)
    except MeshError as error:
        return Finding("fail", "model", str(error), error.hint or "")
    kind = source.config.model_type
    verdict = known_verdicts().get(kind)
    if verdict is None:
        advice = f"run `meshllm model verify {name}`"
        return Finding("warn", "model", f"{name}: `{kind}` was not verified", advice)
    if not verdict.equal:
        return Finding("fail", "model", f"{name}: `{kind}` cannot be split: {verdict.reason}")
    try:
        Text.load(source.folder)
    except ModelError as error:
        return Finding("warn", "model", f"{error}; it cannot be the entry", error.hint or "")
    return Finding("ok", "model", f"{name}: `{kind}` is bit-equal when split")


def check_weights(name: str, cache: Path) -> Finding:
    """Hash the weights as a node does before it serves; equal digests mean equal weights."""
    try:
        parts = manifest(resolve(name), cache)
    except MeshError as error:
        return Finding("fail", "weights", str(error), error.hint or "")
    digest = blake3(b"".join(parts)).hexdigest()[:12]
    if absent := sum(not any(part) for part in parts):
        found = f"{digest}, {absent} of {len(parts)} parts are missing on this machine"
        return Finding("warn", "weights", found, f"run `meshllm model pull {name}`")
    return Finding("ok", "weights", f"{digest}, {len(parts)} parts hashed")


def check_execution(chosen: Settings) -> Finding:
    """Report how this machine would run steps of the model, without loading it."""
    from meshllm.model.kernels import jit
    from meshllm.model.steps.execution import forecast
    from meshllm.node.compute.worker import calibrate

    try:
        source, quant = resolve(chosen.model), Quant(chosen.quant)
        stored = chosen.dtype == "auto"
        dtype = stored_dtype(source) if stored else getattr(torch, chosen.dtype)
        where = device.choose(chosen.device, dtype, quant)
        refusal = device.refused_gpu(chosen.device, dtype, quant)
        with device.using_threads(chosen.threads):
            if where == device.CPU and not chosen.threads:
                width = int(source.config.get_text_config(decoder=True).hidden_size)
                calibrate(torch.get_num_threads(), width, dtype)  # as a node does
            found = forecast(source.config, dtype, where, quant).instead_of_gpu(refusal)
            if where == device.CPU:
                found = replace(found, threads=torch.get_num_threads())
    except MeshError as error:
        return Finding("fail", "execution", str(error), error.hint or "")
    except RuntimeError as error:  # of torch, such as too little memory
        return Finding("fail", "execution", str(error).partition("\n")[0])
    if chosen.exact:
        return Finding("ok", "execution", "stock, one row per step, because of `--exact`")
    if "--dtype" in found.reason:
        return Finding("warn", "execution", str(found), "use `--dtype bfloat16`")
    limits = jit.limits() if where == device.CPU else ()
    verdict: Verdict = "warn" if found.is_fallback or limits else "ok"
    return Finding(verdict, "execution", "; ".join((str(found), *limits)))
