"""Predicted time per token and time to first token of plans, and a comparison of policies."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshllm.errors import MeshError
from meshllm.names import NodeId, Span
from meshllm.protocol.drafting.window import DRAFTS
from meshllm.protocol.planning.chunking import ring_times
from meshllm.protocol.planning.plan import (
    MAX_SECONDS,
    Links,
    ModelSizes,
    Offer,
    Plan,
    PlanConstraints,
)
from meshllm.protocol.planning.policies import POLICIES, UNBOUND, make_plan

PROMPT = 256  # tokens


@dataclass(frozen=True, slots=True)
class PredictedHop:
    """What one rank and its hop to the next add to a token."""

    node: NodeId
    span: Span
    compute_s: float
    """Its layers for one row, without the head."""
    wire_s: float
    """One row to the next rank; 0 in a ring of one."""
    bytes_per_token: int
    """Size of the message to the next rank."""


@dataclass(frozen=True, slots=True)
class DraftEstimate:
    """Speculative decoding on a ring."""

    drafts: int
    """Draft tokens in each step; 0 if none gain anything."""
    seconds_per_token: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted performance of a ring for one session."""

    hops: tuple[PredictedHop, ...]
    head_s: float
    chunk: int
    """Rows of a prefill chunk."""
    ttft_s: float
    """Time to first token, from the prompt at the entry."""
    steps: tuple[tuple[int, float], ...]
    """Draft lengths, and the time of a step with each, its rows computed together."""

    @property
    def is_measured(self) -> bool:
        """Whether every hop was measured: an unmeasured link counts as the slowest possible."""
        return all(hop.wire_s < MAX_SECONDS for hop in self.hops)

    @property
    def seconds_per_token(self) -> float:
        """Time of one trip round the ring, head included."""
        return self.head_s + sum(hop.compute_s + hop.wire_s for hop in self.hops)

    @property
    def slowest_stage_s(self) -> float:
        """Time of the slowest stage, which bounds concurrent sessions."""
        entry, *others = (hop.compute_s for hop in self.hops)
        return max(entry + self.head_s, *others, 0.0)

    def with_drafts(self, acceptance: float) -> DraftEstimate:
        """Find the best draft length if each token is accepted with this probability.

        A step with G of them gives 1 + a + ... + a**G tokens (Leviathan et al., 2023, equation 1).
        """
        return min(
            (
                DraftEstimate(drafts, seconds / sum(acceptance**at for at in range(drafts + 1)))
                for drafts, seconds in self.steps
            ),
            key=lambda each: each.seconds_per_token,
        )


@dataclass(frozen=True, slots=True)
class Alternative:
    """The plan of one policy for the same nodes."""

    policy: str
    plan: Plan | None
    """None if the policy finds no ring."""
    prediction: Prediction | None
    reason: str
    """One sentence."""


def predict(
    plan: Plan,
    offers: Sequence[Offer],
    links: Links,
    shape: ModelSizes,
    *,
    prompt_tokens: int = PROMPT,
) -> Prediction:
    """Predict the times of a plan from offers and links; the prompt is sent in the best chunks.

    Raises:
        UserError: a node of the plan made no offer.
    """
    times = ring_times(plan, offers, links, shape)
    pace = times.best_pace(prompt_tokens)
    return Prediction(
        hops=tuple(
            PredictedHop(
                at.node,
                at.span,
                times.ranks[rank].compute_s(1),
                times.wire_s(rank, 1),
                times.message_bytes(1),
            )
            for rank, at in enumerate(plan.stages)
        ),
        head_s=times.head_s,
        chunk=pace.chunk,
        ttft_s=times.first_token_s(prompt_tokens, pace),
        steps=tuple((drafts, times.step_s(1 + drafts)) for drafts in DRAFTS),
    )


def compare(
    offers: Sequence[Offer], links: Links, shape: ModelSizes, *, terms: PlanConstraints = UNBOUND
) -> tuple[Alternative, ...]:
    """Plan with every policy, the default first."""
    found: list[Alternative] = []
    for policy in POLICIES:
        try:
            plan = make_plan(offers, links, shape, policy=policy, terms=terms)
        except MeshError as error:
            found.append(Alternative(policy, None, None, str(error)))
        else:
            prediction = predict(plan, offers, links, shape)
            best = found[0].prediction if found else None
            found.append(Alternative(policy, plan, prediction, _reason(prediction, best)))
    return tuple(found)


def _reason(prediction: Prediction, auto: Prediction | None) -> str:
    token, stage = prediction.seconds_per_token, prediction.slowest_stage_s
    words = f"{token * 1e3:.1f} ms per token, {stage * 1e3:.1f} ms in the slowest stage"
    if auto is None:
        return words
    ratios = token / auto.seconds_per_token, stage / auto.slowest_stage_s
    return f"{words}: {ratios[0]:.2f} and {ratios[1]:.2f} times those of `auto`"
