"""Replaces the linear modules of a model by quantised ones.

Theory of operation
-------------------
Each matrix is packed separately and cached on disk, keyed by the digest of its weights; on the next
start it is mapped from there and the plain weights are not read. Modules that read the same input
share a matrix. Before it is used, a matrix is tested on sampled rows, some with outliers: if the
error is too large, its modules stay plain and are named in the log.

Embedding tables stay as they are, and so do parameters outside linear modules, such as the stacked
experts of a mixture. A head tied to the embedding is packed; the table then serves lookups only.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from meshllm.model.modules.quant_choice import UnquantisedWeight, choose, fusable_groups
from meshllm.model.modules.quant_kernels import kernel, size_of
from meshllm.model.modules.quant_linear import FusedProjections, QuantLinear
from meshllm.model.modules.quant_matrix import QuantMatrix, Shape
from meshllm.model.modules.quant_store import evict, load, save
from meshllm.model.pages import page_out
from meshllm.model.pauses import pause
from meshllm.names import Quant

SAMPLES = 16  # rows that a matrix is tested on
OUTLIERS = 3  # inputs of every second sample that are `LARGER` times larger than the rest
LARGER = 100.0

_RECIPE = "3"  # version of cached matrices; change it if packing gives other bytes
_TINY = 1e-30  # smallest norm that an error is divided by

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QuantReport:
    """The result of quantising a model."""

    kind: Quant
    modules: int = 0
    """Linear modules that were replaced."""
    bytes: int = 0
    """Memory of their packed matrices."""
    plain_bytes: int = 0
    """Memory that they took before."""
    plain: tuple[UnquantisedWeight, ...] = ()


@torch.inference_mode()
def quantise(
    model: nn.Module,
    kind: Quant,
    *,
    skip: Iterable[str] = (),
    digests: Mapping[str, str] | None = None,
    cache: Path | None = None,
    mapped: bool = True,
) -> QuantReport:
    """Replace the linear modules of a model in place, except those in or under ``skip``.

    With ``digests`` of the weights by parameter name, from `quant_store.digest_weights`, packed
    matrices are cached in the folder ``cache``. Plain weights that are ``mapped`` from a file stay
    available, unread; others are freed.

    Raises:
        ModelError: this CPU, or this build of torch, has no such kernel.
    """
    if kind is Quant.NONE:
        return QuantReport(kind)
    linears, plain = choose(model, kind, skip)
    work = _Quantizer(model, kind, digests or {}, cache, mapped)
    for names in fusable_groups(linears):
        pause()
        plain += work.replace({name: linears[name] for name in names})
    if cache is not None:
        evict(cache)
    report = QuantReport(kind, work.modules, work.bytes, work.plain_bytes, tuple(plain))
    _log_report(report)
    return report


class _Quantizer:
    """Packs and replaces the matrices of one model, one at a time."""

    def __init__(
        self,
        model: nn.Module,
        kind: Quant,
        digests: Mapping[str, str],
        cache: Path | None,
        mapped: bool,
    ) -> None:
        self.modules = self.bytes = self.plain_bytes = 0
        self._model, self._kind, self._cache, self._mapped = model, kind, cache, mapped
        self._kernel = kernel(kind)
        self._digests = {  # by identity: both sides of a tie are the same parameter
            id(parameter): digests[name]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if name in digests
        }

    def replace(self, linears: Mapping[str, nn.Linear]) -> list[UnquantisedWeight]:
        """Replace modules that read the same input; return those that stay plain."""
        modules = list(linears.values())
        shape = sum(module.out_features for module in modules), modules[0].in_features
        matrix = self._find(modules, shape)
        if matrix is None:
            matrix, error = self._make(modules, shape)
            if matrix is None and len(modules) > 1:
                return [bad for one in linears.items() for bad in self.replace(dict([one]))]
            if matrix is None:
                reason = f"its error would be {error:.3f}, more than {self._kernel.limit}"
                return [UnquantisedWeight(name, shape, reason, lossy=True) for name in linears]
        self._replace(linears, matrix)
        return []

    def _find(self, modules: Sequence[nn.Linear], shape: Shape) -> QuantMatrix | None:
        key = self._key(modules, shape)
        if self._cache is None or key is None:
            return None
        packed = load(self._cache, key, self._kernel.form(shape, modules[0].weight.dtype))
        return None if packed is None else self._kernel.open(packed, shape)

    def _make(self, modules: Sequence[nn.Linear], shape: Shape) -> tuple[QuantMatrix | None, float]:
        """Pack and test a matrix; cache it if it is good, and map it from the cache."""
        weights = [module.weight.detach() for module in modules]
        packed = self._kernel.pack(weights[0] if len(weights) == 1 else torch.cat(weights))
        matrix = self._kernel.open(packed, shape)
        error = _error(matrix, weights)
        if not error <= self._kernel.limit:  # it may be NaN
            return None, error
        key = self._key(modules, shape)
        if self._cache is not None and key is not None:
            save(self._cache, key, packed)
            matrix = self._find(modules, shape) or matrix
        return matrix, error

    def _key(self, modules: Sequence[nn.Linear], shape: Shape) -> str | None:
        """Return the cache key of a packed matrix; None if a weight has no digest."""
        digests = [self._digests.get(id(module.weight), "") for module in modules]
        if not all(digests):
            return None
        made_by = _RECIPE, torch.__version__, transformers.__version__
        forms = [f"{module.weight.dtype} {module.weight.shape}" for module in modules]
        return "\n".join([self._kind, *made_by, *forms, *digests])

    def _replace(self, linears: Mapping[str, nn.Linear], matrix: QuantMatrix) -> None:
        fused = FusedProjections(matrix, [module.out_features for module in linears.values()])
        dtype = next(iter(linears.values())).weight.dtype
        self.bytes += size_of(self._kernel.form(matrix.shape, dtype))
        for index, (name, plain) in enumerate(linears.items()):
            self.modules += 1
            self.plain_bytes += plain.weight.nbytes
            if self._mapped:
                page_out(plain.weight)
            else:
                plain.weight = nn.Parameter(plain.weight.to("meta"), requires_grad=False)
            self._model.set_submodule(name, QuantLinear(plain, fused, index))


def _error(matrix: QuantMatrix, weights: Sequence[Tensor]) -> float:
    """Return the largest relative error of a packed matrix against its plain ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, matrix.shape[1], generator=generator)
    x[::2, torch.randperm(x.shape[1], generator=generator)[:OUTLIERS]] *= LARGER
    x = x.to(weights[0].dtype)
    products = torch.split(matrix(x).float(), [len(weight) for weight in weights], 1)
    plain = [nn.functional.linear(x, weight).float() for weight in weights]
    errors = [
        (mine[kind::2] - theirs[kind::2]).norm() / theirs[kind::2].norm().clamp_min(_TINY)
        for mine, theirs in zip(products, plain, strict=True)
        for kind in (0, 1)  # with outliers, and without
    ]
    return float(torch.stack(errors).max())


def _log_report(report: QuantReport) -> None:
    megabytes = report.bytes / 1e6, report.plain_bytes / 1e6
    log.info("%s: %d modules in %.0f MB instead of %.0f", report.kind, report.modules, *megabytes)
    for plain in report.plain:
        level = logging.INFO if report.modules and not plain.lossy else logging.WARNING
        log.log(level, "`%s` %s stays plain: %s", plain.name, list(plain.shape), plain.reason)
