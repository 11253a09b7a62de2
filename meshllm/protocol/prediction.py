"""How long a plan takes per token and to the first one, beside other plans; decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshllm.errors import MeshError
from meshllm.names import DIGEST_BYTES, SESSION_ID_BYTES, Digest, NodeId, SessionId, Span
from meshllm.protocol.codec import size
from meshllm.protocol.messages import Blob, Data, DType, Flags
from meshllm.protocol.plan import Links, Offer, Plan, Policy, Shape, Terms, Wire
from meshllm.protocol.policies import UNBOUND, make_plan

CHUNK = 256  # rows; the best chunk of a long prompt on a CPU is 128 to 256


@dataclass(frozen=True, slots=True)
class PredictedHop:
    """What one rank and its way to the next add to a token."""

    node: NodeId
    span: Span
    compute_s: float
    """Its layers for one row; the head is not among them."""
    wire_s: float
    """One row to the next rank; 0 in a ring of one."""
    bytes_per_token: int
    """The message to the next rank."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """How a ring will perform for one session."""

    hops: tuple[PredictedHop, ...]
    head_s: float
    ttft_s: float
    """From the prompt at the entry to the first token."""

    @property
    def seconds_per_token(self) -> float:
        """Time of one trip round the ring, head included."""
        return self.head_s + sum(hop.compute_s + hop.wire_s for hop in self.hops)

    @property
    def slowest_stage_s(self) -> float:
        """Time of the stage that bounds many sessions at once."""
        entry, *others = (hop.compute_s for hop in self.hops)
        return max(entry + self.head_s, *others, 0.0)


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a policy would do with the same nodes."""

    policy: Policy
    plan: Plan | None
    """None where the policy finds no ring."""
    prediction: Prediction | None
    reason: str
    """One sentence."""


def predict(
    plan: Plan, offers: Sequence[Offer], links: Links, shape: Shape, *, prompt_tokens: int = CHUNK
) -> Prediction:
    """Add up what the offers and links say about a plan.

    A prompt goes round in chunks of `CHUNK` rows, and a rank takes the next chunk while the rank
    behind it has the last one. Layers take time in proportion to their weights.
    """
    by_node = {offer.node: offer for offer in offers}
    ring = [by_node[stage.node] for stage in plan.stages]
    means = [_mean_layers(shape, stage.span) for stage in plan.stages]
    ways = _ways(plan, links)
    row, overhead = shape.hidden_size * shape.itemsize, _overhead()

    def compute(rank: int, rows: int) -> float:
        return ring[rank].layer_seconds(rows) * means[rank]

    def wire(rank: int, rows: int) -> float:
        return ways[rank].seconds(rows * row + overhead) if len(ways) > 1 else 0.0

    done = [0.0] * len(ring)
    for rows in _chunks(prompt_tokens):
        arrived = 0.0
        for rank in range(len(ring)):
            done[rank] = max(done[rank], arrived) + compute(rank, rows)
            arrived = done[rank] + wire(rank, rows)
    head_s = ring[0].head_s
    return Prediction(
        hops=tuple(
            PredictedHop(at.node, at.span, compute(rank, 1), wire(rank, 1), row + overhead)
            for rank, at in enumerate(plan.stages)
        ),
        head_s=head_s,
        ttft_s=done[-1] + wire(len(ring) - 1, 1) + head_s,
    )


def compare(
    offers: Sequence[Offer], links: Links, shape: Shape, *, terms: Terms = UNBOUND
) -> tuple[Alternative, ...]:
    """Plan with every policy, `fastest` first."""
    found: list[Alternative] = []
    for policy in (Policy.FASTEST, Policy.THROUGHPUT, Policy.PROPORTIONAL):
        try:
            plan = make_plan(offers, links, shape, policy=policy, terms=terms)
        except MeshError as error:
            found.append(Alternative(policy, None, None, str(error)))
        else:
            prediction = predict(plan, offers, links, shape)
            best = found[0].prediction if found else None
            found.append(Alternative(policy, plan, prediction, _reason(prediction, best)))
    return tuple(found)


def _reason(prediction: Prediction, fastest: Prediction | None) -> str:
    token, stage = prediction.seconds_per_token, prediction.slowest_stage_s
    words = f"{token * 1e3:.1f} ms per token, {stage * 1e3:.1f} ms in the slowest stage"
    if fastest is None:
        return words
    ratios = token / fastest.seconds_per_token, stage / fastest.slowest_stage_s
    return f"{words}: {ratios[0]:.2f} and {ratios[1]:.2f} times those of `fastest`"


def _mean_layers(shape: Shape, span: Span) -> float:
    return sum(shape.layer_bytes[span.start : span.stop]) * shape.layers / sum(shape.layer_bytes)


def _ways(plan: Plan, links: Links) -> list[Wire]:
    nodes = [stage.node for stage in plan.stages]
    return [
        links.between(here, there)
        for here, there in zip(nodes, (*nodes[1:], nodes[0]), strict=True)
    ]


def _chunks(prompt_tokens: int) -> list[int]:
    whole, rest = divmod(prompt_tokens, CHUNK)
    return [CHUNK] * whole + [rest] * (rest > 0)


def _overhead() -> int:
    """Count the bytes of a Data message beside its rows."""
    blob = Blob(DType.BFLOAT16, (), Digest(bytes(DIGEST_BYTES)), b"")
    return size(Data(SessionId(bytes(SESSION_ID_BYTES)), 0, 0, 0, 1, Flags(0), blob))
