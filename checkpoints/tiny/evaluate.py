"""Measures the tiny checkpoint on held-out documents with the engine that the package ships.

Run as ``python -m da_jax.checkpoints.tiny.evaluate``. It prints one JSON object, in which shares
are of 1:

* ``exact_da``, ``exact_unmasked``: whole responses that are exact, over all question types, with
  the declared masks and with everything visible;
* ``wrong_id_masked``, ``wrong_id_unmasked``: right answers after the chunk number in the focus tag
  was overwritten by a wrong one. The first must be near 0, or the mask does nothing;
* ``reduction_100_chunks``, ``reduction_long_local``: attended tokens saved at about 100 chunks, for
  questions with one key and for those with a long LOCAL block;
* ``exact_da_100_chunks``, ``exact_unmasked_100_chunks``: exact responses at about 100 chunks;
* ``n`` responses in each arm at 8 to 26 chunks, from ``seeds`` data seeds; ``by_type`` of question.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from da_jax.checkpoints.tiny import language as lang
from da_jax.engine.llm import LLM
from da_jax.engine.request import Done, Response
from da_jax.protocol.modes import Arm

CHUNKS = (8, 26)
MANY_CHUNKS = (98, 104)
PER_DOCUMENT = 5
"""Questions about one document: one of each type."""


@dataclass(frozen=True)
class Case:
    """A held-out question about a document, and the tokens of its one right response."""

    document: lang.Document
    question: lang.Question
    tokens: tuple[lang.Token, ...]

    @property
    def text(self) -> str:
        """The right response, without the token that ends the turn."""
        return "".join(token.piece for token in self.tokens[:-1])

    @property
    def answer(self) -> str:
        """The text of the LOCAL block."""
        return self.text.partition(lang.LOCAL)[2].removesuffix(lang.LOCAL_END).strip()

    def wrong_id(self) -> tuple[int, ...]:
        """The response up to the chunk number in its focus tag, which is another chunk's."""
        at = [token.piece for token in self.tokens].index(lang.FOCUS) + 1
        right = self.document.facts[self.question.keys[0]].chunk
        wrong = right % len(self.document.chunks) + 1
        pieces = [token.piece for token in self.tokens[:at]]
        return tuple(lang.IDS[piece] for piece in [*pieces, f"{wrong}"])


def cases(seed: int, count: int, chunks: tuple[int, int]) -> list[Case]:
    """Draws held-out questions, one of each type a document."""
    rng = np.random.default_rng((seed, *chunks))
    drawn: list[Case] = []
    while len(drawn) < count:
        size = int(rng.integers(chunks[0], chunks[1] + 1))
        document = lang.make_document(rng, size, held_out=True)
        for kind in lang.KINDS:
            question = lang.ask(rng, document, kind)
            if question is not None:
                drawn.append(Case(document, question, tuple(lang.respond(document, question))))
    return drawn[:count]


def respond(llm: LLM, asked: list[Case], arm: Arm, *, wrong_id: bool = False) -> list[Response]:
    """The engine's greedy responses, in order."""
    requests = [
        llm.request(
            case.document.text,
            case.question.text,
            arm=arm,
            max_tokens=128,
            forced=case.wrong_id() if wrong_id else (),
        )
        for case in asked
    ]
    done = {e.request_id: e.response for e in llm.engine.run(requests) if isinstance(e, Done)}
    return [response for _, response in sorted(done.items())]


def is_exact(case: Case, response: Response) -> bool:
    """Whether the response is right to the last token, and ended by itself."""
    return response.finish_reason == "stop" and response.text == case.text


def reduction(responses: list[Response]) -> float:
    """Share of the attended tokens that the masks saved."""
    attended = sum(r.summary["attended"]["total"] for r in responses)
    return 1 - attended / sum(r.summary["attended_vanilla"] for r in responses)


def measure(llm: LLM, seeds: int, count: int) -> dict[str, Any]:
    """All numbers, over ``count`` cases from each seed, and a third as many at 100 chunks."""
    short = [case for seed in range(seeds) for case in cases(seed, count, CHUNKS)]
    few = max(count // 3, PER_DOCUMENT)
    long = [case for seed in range(seeds) for case in cases(seed, few, MANY_CHUNKS)]
    mean = lambda values: round(float(np.mean(list(values))), 4)

    def exact(asked: list[Case], responses: list[Response], kind: str | None = None) -> float:
        pairs = zip(asked, responses)
        return mean(is_exact(c, r) for c, r in pairs if kind in (None, c.question.kind))

    def wrong_id(arm: Arm) -> float:
        one_focus = [case for case in short if case.question.kind in ("one", "spell")]
        answers = respond(llm, one_focus, arm, wrong_id=True)
        return mean(c.answer == r.answer for c, r in zip(one_focus, answers))

    masked, unmasked = respond(llm, short, Arm.DA), respond(llm, short, Arm.UNMASKED)
    many, many_unmasked = respond(llm, long, Arm.DA), respond(llm, long, Arm.UNMASKED)
    of_kind = lambda kind: [r for c, r in zip(long, many) if c.question.kind == kind]
    return {
        "exact_da": exact(short, masked),
        "exact_unmasked": exact(short, unmasked),
        "wrong_id_masked": wrong_id(Arm.DA),
        "wrong_id_unmasked": wrong_id(Arm.UNMASKED),
        "reduction_100_chunks": round(reduction(of_kind("one")), 4),
        "reduction_long_local": round(reduction(of_kind("spell")), 4),
        "exact_da_100_chunks": exact(long, many),
        "exact_unmasked_100_chunks": exact(long, many_unmasked),
        "n": len(short),
        "seeds": seeds,
        "by_type": {
            kind: {
                "exact_da": exact(short, masked, kind),
                "exact_unmasked": exact(short, unmasked, kind),
                "exact_da_100_chunks": exact(long, many, kind),
                "exact_unmasked_100_chunks": exact(long, many_unmasked, kind),
            }
            for kind in lang.KINDS
        },
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measures the tiny checkpoint, held out.")
    parser.add_argument("--checkpoint", default="tiny", help="a folder, or tiny (the default)")
    parser.add_argument("--seeds", type=int, default=3, help="number of data seeds")
    parser.add_argument("--n", type=int, default=100, help="questions a seed")
    parser.add_argument("--quick", action="store_true", help="15 questions a seed")
    parser.add_argument("--dtype", default="auto", help="what the engine computes in")
    parser.add_argument("--json", action="store_true", help="print the object on one line")
    arguments = parser.parse_args()
    llm = LLM.from_pretrained(arguments.checkpoint, dtype=arguments.dtype, max_model_len=4096)
    results = measure(llm, arguments.seeds, 15 if arguments.quick else arguments.n)
    print(json.dumps(results, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
