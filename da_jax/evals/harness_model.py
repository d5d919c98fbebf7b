"""The model class `da_jax` of EleutherAI's lm-evaluation-harness.

The harness finds no models by itself: import this module first, then `model="da_jax"` works, or
give an instance of `HarnessModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from da_jax.engine.llm import LLM
from da_jax.engine.request import Done, Request, Response, SamplingParams
from da_jax.evals.harness_split import Split, split_prompt
from da_jax.protocol.modes import Arm
from da_jax.protocol.prompt import PromptMap

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import (
        get_rolling_token_windows,
        make_disjoint_window,
    )
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is missing; install it with: pip install 'da-jax[eval]'", name=error.name
    ) from error

ARMS = (Arm.VANILLA.value, Arm.UNMASKED.value, Arm.DA.value)
_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty")
_IGNORED = ("do_sample", "until", "max_gen_toks")


class ContextTooLong(ValueError):
    """Prompts that do not fit, with how many and the remedy; nothing was computed."""


class Account(NamedTuple):
    """What one generated response cost.

    Attributes:
      task: name of its task.
      response: the response.
    """

    task: str
    response: Response


class _Generation(NamedTuple):
    """A response to make, the strings that end its answer, and what it may begin with."""

    task: str
    prompt: PromptMap
    params: SamplingParams
    until: tuple[str, ...]
    prefix: str


@register_model("da_jax")
class HarnessModel(TemplateLM):
    """A model of the harness.

    In the arm `vanilla` the model gets the harness's text as it is. In the arms `unmasked` and `da`
    the text is cut into document and question (`split`), and da-jax renders its own prompt with its
    chat template; stop strings then end the answer, as a response that declares may have several
    lines. Every arm returns `Response.answer`: without tags and thoughts.

    A task's `gen_prefix` is, with a chat template, the start of the assistant's turn in the arm
    `vanilla`. A response that declares cannot begin with it: in the other arms it is the end of the
    question, as the harness writes it without a chat template. An answer that repeats a
    `gen_prefix` field of the example at its start is returned without it, in every arm.

    Args:
      pretrained: an `LLM`, or what `LLM.from_pretrained` takes.
      arm: `vanilla`, `unmasked` or `da`.
      max_gen_toks: most tokens of a response where the task does not say.
      min_gen_toks: a task's own cap below this is raised to it, in every arm alike. RULER's 30 to
        128 tokens end a response that first declares.
      max_tokens: most tokens of every response, in place of the task's own cap and of
        `min_gen_toks`.
      truncate: cut what does not fit from the left of the document, and count it; without it that
        is an error before anything is computed. What a chat template writes, and a token that
        starts every text, stay. A log-likelihood names no document: its context is cut.
      seed: of requests that sample.
      split: cuts a prompt for the arms `unmasked` and `da`.
      batch_size, max_batch_size, device: what the harness passes; the engine batches by itself, so
        they change nothing.
      **options: of `LLM.from_pretrained`, such as `max_model_len`.

    Attributes:
      truncated: contexts that were cut so far.
      raised, lowered: responses so far whose cap was raised, or lowered.
      accounts: of the responses so far.

    Raises:
      ValueError: an unknown arm, or options for a model that is loaded already.
    """

    def __init__(
        self,
        pretrained: LLM | str = "tiny",
        *,
        arm: str = "vanilla",
        max_gen_toks: int = 512,
        min_gen_toks: int = 0,
        max_tokens: int | None = None,
        truncate: bool = False,
        seed: int = 0,
        split: Split = split_prompt,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if arm not in ARMS:
            raise ValueError(f"arm is {arm!r}; it must be one of {', '.join(ARMS)}")
        if isinstance(pretrained, LLM) and options:
            raise ValueError(f"{sorted(options)} cannot be set, as the model is loaded already")
        if isinstance(pretrained, LLM):
            self.llm = pretrained
        else:
            self.llm = LLM.from_pretrained(pretrained, **options)
        self.arm, self.tokenizer, self.seed = Arm(arm), self.llm.tokenizer, seed
        self.truncate, self.min_gen_toks, self._split = truncate, min_gen_toks, split
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
        self._max_gen_toks, self.max_tokens = max_gen_toks, max_tokens
        self.truncated = self.raised = self.lowered = 0
        self._contents: dict[str, str] = {}  # what is cut of a text that a chat template wrote
        self.accounts: list[Account] = []

    @property
    def renders(self) -> bool:
        """Whether da-jax renders the prompt of a response; else it is the harness's text.

        A checkpoint that knows only the DA prompt gets it in the arm `vanilla` too.
        """
        return self.arm is not Arm.VANILLA or self.llm.renderer.style.da_only

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end-of-text token."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token; set it in tokenizer_config.json")
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: the first token of a text, if there is one."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Most tokens of context and continuation together."""
        return self.llm.engine.max_len

    @property
    def max_gen_toks(self) -> int:
        """Most tokens of a response where the task does not say."""
        return self.max_tokens or max(self._max_gen_toks, self.min_gen_toks)

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer and how it is prompted, for the harness's cache of requests."""
        return f"{self.tokenizer.name_or_path}__{self.arm}".replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids; by default as the tokenizer's own, without a second start token."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The turns as the model's chat template writes them. Arm `vanilla` only."""
        if self.arm is not Arm.VANILLA:
            raise ValueError(
                f"the arm '{self.arm}' renders the chat template itself; "
                "leave apply_chat_template off"
            )
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.llm.renderer.template_kwargs,
        )
        asked = [turn["content"] for turn in chat_history if turn["role"] == "user"]
        if self.truncate and asked:
            self._contents[text] = asked[-1]
        return text

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results about the model."""
        return {
            "arm": self.arm.value,
            "style": self.llm.renderer.style.name,
            "max_length": self.max_length,
            "max_gen_toks": self.max_gen_toks,
            "min_gen_toks": self.min_gen_toks,
            "max_tokens": self.max_tokens,
            "truncate": self.truncate,
            "truncated": self.truncated,
            "raised": self.raised,
            "lowered": self.lowered,
        }

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generates a response for each (context, generation options).

        Raises:
          ContextTooLong: a prompt and the longest response to it are longer than the window, and
            `truncate` is off.
          ValueError: a generation option that the engine does not have.
        """
        made = [self._generation(request, number) for number, request in enumerate(requests)]
        self._check_fit([(m.task, len(m.prompt), m.params.max_tokens) for m in made])
        queue = [Request(m.prompt, m.params, arm=self.arm) for m in made]
        answers = []
        responses = self._run(queue, "generating", disable_tqdm)
        for request, generation, response in zip(requests, made, responses):
            answer = response.answer.removeprefix(generation.prefix).lstrip()
            answer = _cut(answer, generation.until)
            self.accounts.append(Account(generation.task, response))
            self.cache_hook.add_partial("generate_until", request.args, answer)
            answers.append(answer)
        return answers

    def _generation(self, request: Instance, number: int) -> _Generation:
        context, options = request.args
        task = request.task_name or "the task"
        options = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        unknown = sorted(options.keys() - {*_SAMPLING, *_IGNORED})
        if unknown:
            raise ValueError(
                f"{task} asks for the generation options {unknown}, which da-jax does not have; "
                f"it has {', '.join(sorted({*_SAMPLING, *_IGNORED}))}"
            )
        limit = self.max_tokens or max(options["max_gen_toks"], self.min_gen_toks)
        self.raised += limit > options["max_gen_toks"]
        self.lowered += limit < options["max_gen_toks"]
        until = tuple(text for text in options["until"] if text)
        # Thoughts and declarations have lines of their own, which must not end the response.
        whole = self.renders or self.llm.renderer.template_kwargs["enable_thinking"]
        sampling = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
        params = SamplingParams(
            max_tokens=limit, seed=self.seed + number, stop=() if whole else until, **sampling
        )
        example = request.doc or {}
        prompt = self._prompt(example, context, self.max_length - limit)
        prefix = example.get("gen_prefix")
        return _Generation(task, prompt, params, until, prefix if isinstance(prefix, str) else "")

    def _prompt(self, example: Mapping[str, Any], context: str, room: int) -> PromptMap:
        """The prompt of a context, its document cut to `room` tokens where that is allowed."""
        render: Callable[[str], PromptMap]
        if self.renders:
            document, question = self._split(example, context)

            def render(document: str) -> PromptMap:
                return self.llm.renderer.render(document or None, question, arm=self.arm.value)
        elif not self.truncate:
            return plain_prompt(self.tok_encode(context))
        else:
            before, document, after = self._parts(example, context)

            def render(document: str) -> PromptMap:
                return plain_prompt(self.tok_encode(f"{before}{document}{after}"))

        prompt = render(document)
        if not self.truncate or len(prompt) <= room:
            return prompt
        self.truncated += 1
        while document and len(prompt) > room:
            encoding = self.tokenizer(
                document, add_special_tokens=False, return_offsets_mapping=True
            )
            over = len(prompt) - room
            starts = [start for start, _ in encoding["offset_mapping"] if start]
            document = document[starts[over - 1] :] if over <= len(starts) else ""
            prompt = render(document)
        return prompt

    def _parts(self, example: Mapping[str, Any], context: str) -> tuple[str, str, str]:
        """What stands before the document of a text of the harness, the document, and the rest."""
        text = self._content(context)
        document = self._split(example, text)[0]
        if document not in text or not document:
            document = text
        before, _, after = context.rpartition(text)
        head, _, tail = text.rpartition(document)
        return before + head, document, tail + after

    def _content(self, context: str) -> str:
        """What a context asks: of a text that a chat template wrote, the last turn of the user."""
        text = self._contents.get(context, "").strip()
        return text if text and text in context else context.strip()

    def _last(self, context: str, ids: list[int], room: int) -> list[int]:
        """The last tokens that fit, after what starts every text, where cutting is allowed."""
        if not self.truncate or len(ids) <= room or room < 1:
            return ids
        head = context[: context.rindex(self._content(context))]
        kept = max(len(self.tok_encode(head)), int(ids[0] == self.tokenizer.bos_token_id))
        if kept >= room:
            return ids
        self.truncated += 1
        return ids[:kept] + ids[len(ids) - room + kept :]

    def _check_fit(self, sizes: Iterable[tuple[str, int, int]]) -> None:
        """Refuses what does not fit; sizes are (task, tokens of the context, tokens after it)."""
        sizes = list(sizes)
        long = [entry for entry in sizes if entry[1] + entry[2] > self.max_length]
        if not long:
            return
        task, context, after = max(long, key=lambda entry: entry[1] + entry[2])
        remedy = "the context alone cannot be cut enough" if self.truncate else "truncate=True cuts"
        raise ContextTooLong(
            f"{len(long)} of {len(sizes)} requests do not fit max_model_len={self.max_length}: the "
            f"longest, of {task}, has a context of {context} tokens and {after} tokens after it; "
            f"raise max_model_len or take shorter examples or responses ({remedy}"
            f"{'' if self.truncate else ' documents from the left and counts them'})"
        )

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of each continuation.

        A context is cut from the left alone (see `truncate`); a continuation never.

        Raises:
          ContextTooLong: context and continuation are longer than the window and `truncate` is off,
            or a continuation is by itself.
          ValueError: in the arms `unmasked` and `da`, as nothing is declared in a given text.
        """
        if self.arm is not Arm.VANILLA:
            raise ValueError(
                f"a task scored by log-likelihood lets nothing be declared, so that the arm "
                f"'{self.arm}' says nothing about it; run it in the arm 'vanilla'"
            )
        queue, sizes = [], []
        for (before, text), context, continuation in requests:
            if len(continuation) >= self.max_length:
                raise ContextTooLong(
                    f"the continuation {text[:40]!r}… has {len(continuation)} tokens, and with one "
                    f"of context that is more than max_model_len={self.max_length}; raise it"
                )
            context = self._last(before, context, self.max_length - len(continuation))
            sizes.append(("log-likelihood", len(context), len(continuation)))
            if continuation:
                queue.append(_scoring(context, continuation))
        self._check_fit(sizes)
        responses = self._run(queue, "scoring", disable_tqdm)
        results = []
        for pair, _, continuation in requests:
            result = _judged(next(responses)) if continuation else (0.0, True)
            self.cache_hook.add_partial("loglikelihood", pair, result)
            results.append(result)
        return results

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of each whole text, in windows where it is longer than the model's.

        Every token is scored once. The first one follows `prefix_token_id`; every window but the
        last starts anew with one token of context, and the last one is as long as can be.
        """
        windows: list[tuple[tuple[str, str], list[int], list[int]]] = []
        counts = []
        for (text,) in [request.args for request in requests]:
            found = [
                make_disjoint_window(pair)
                for pair in get_rolling_token_windows(
                    token_list=self.tok_encode(text, add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length - 1,  # the engine counts what is scored as well
                    context_len=1,
                )
            ]
            windows += [(("", text), context, scored) for context, scored in found]
            counts.append(len(found))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        results = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, result in zip(requests, results):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def _run(self, queue: list[Request], what: str, quiet: bool) -> Iterator[Response]:
        """The responses in the order of the requests."""
        done: dict[int, Response] = {}
        with tqdm(total=len(queue), desc=what, disable=quiet or not queue) as bar:
            for event in self.llm.loop.run(queue):
                if isinstance(event, Done):
                    done[event.request_id] = event.response
                    bar.update()
        return iter([response for _, response in sorted(done.items())])


def plain_prompt(ids: Sequence[int]) -> PromptMap:
    """A prompt of token ids without chunks and without a chat template."""
    tokens = np.asarray(ids, np.int32)
    tokens.setflags(write=False)
    scaffold = ((0, len(tokens)),) if len(tokens) else ()
    return PromptMap(tokens, (), scaffold, "", (), (), (), Arm.VANILLA)


def _scoring(context: Sequence[int], continuation: Sequence[int]) -> Request:
    params = SamplingParams(max_tokens=len(continuation), logprobs=1)
    return Request(plain_prompt(context), params, arm=Arm.VANILLA, forced=tuple(continuation))


def _judged(response: Response) -> tuple[float, bool]:
    entries = response.logprobs
    greedy = all(entry.top[0][0] == entry.token_id for entry in entries)
    return float(sum(entry.logprob for entry in entries)), greedy


def _cut(text: str, until: Sequence[str]) -> str:
    """The text before the first of some strings."""
    return text[: min([len(text), *(at for end in until if (at := text.find(end)) >= 0)])]
