"""`LLM`: a checkpoint, its tokenizer and prompt style, and the engine, behind a few methods."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from da_jax.checkpoints import convert
from da_jax.engine import compilations
from da_jax.engine.config import EngineConfig
from da_jax.engine.detokenize import TokenTable
from da_jax.engine.engine import Engine, RequestError
from da_jax.engine.request import Done, Event, Request, Response, SamplingParams
from da_jax.kernels.paged_attention import choose
from da_jax.models.config import read_json
from da_jax.models.qwen import Qwen3
from da_jax.protocol.chunks import Chunk
from da_jax.protocol.modes import AnswerMode, Arm
from da_jax.protocol.prompt import PromptRenderer
from da_jax.protocol.styles import Style
from da_jax.protocol.visibility import Scaffold

Document = str | Sequence[str | Chunk]
Progress = Callable[[str, int, int], None]


class LLM:
    """A language model that reads only the KV pages that it declared.

    Args:
      model: the model.
      tokenizer: its fast Hugging Face tokenizer, with a chat template.
      stop_ids: tokens that end a response.
      style: how prompts are written, see `PromptRenderer`.
      config: settings of the engine.
      template_kwargs: passed to the chat template, such as `{"enable_thinking": False}`.
      progress: called with (stage, done, total) while programs compile.

    Raises:
      ValueError: a setting, a style or a chat template that cannot work.
    """

    def __init__(
        self,
        model: Qwen3,
        tokenizer: Any,
        stop_ids: frozenset[int],
        *,
        style: Style | str = "auto",
        config: EngineConfig | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: Progress = lambda stage, done, total: None,
    ):
        self.tokenizer = tokenizer
        self.renderer = PromptRenderer(tokenizer, style, template_kwargs=template_kwargs)
        table = TokenTable.from_tokenizer(tokenizer)
        self.engine = Engine(model, table, stop_ids, config or EngineConfig())
        self.engine.warm_up(lambda done, total: progress("compiling", done, total))
        self._compiled = compilations.count()

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path = "tiny",
        *,
        style: Style | str = "auto",
        revision: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: Progress = lambda stage, done, total: None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> LLM:
        """Loads a checkpoint.

        Args:
          path_or_id: a Hugging Face or Orbax folder, a hub id, or `tiny`, which ships with the
            package.
          style: `auto` takes the checkpoint's own style, else the native tool calls of its
            template, else `plain`.
          revision: branch, tag or commit on the hub.
          template_kwargs: passed to the chat template.
          progress: called with (stage, done, total).
          config: settings of the engine; or give its fields as keyword `options`.
          **options: fields of `EngineConfig`, such as `max_model_len=8192`.

        Raises:
          FileNotFoundError, ConfigError, CheckpointError: what is wrong with the checkpoint.
          ValueError: a setting that cannot work.
          BackendError: the attention backend cannot run here, or not this model.
        """
        config = dataclasses.replace(config or EngineConfig(), **options)
        choose(config.attention)  # refuses one that cannot run here before anything is loaded
        progress("loading", 0, 1)
        folder = convert.resolve(path_or_id, revision=revision)
        model = convert.load(folder, dtype=_dtype(config.dtype))
        tokenizer = load_tokenizer(folder)
        progress("loading", 1, 1)
        return cls(
            model,
            tokenizer,
            stop_token_ids(folder, tokenizer),
            style=style,
            config=config,
            template_kwargs=template_kwargs,
            progress=progress,
        )

    @property
    def compilations_after_warmup(self) -> int:
        """Programs that this process compiled since the engine was ready; 0 unless others did."""
        return compilations.count() - self._compiled

    def request(
        self,
        document: Document,
        question: str,
        *,
        arm: Arm | str = Arm.DA,
        sampling: SamplingParams | None = None,
        system: str | None = None,
        history: Sequence[Mapping[str, str]] = (),
        forced: str | Sequence[int] = (),
        answer_mode: AnswerMode = "local",
        scaffold: Scaffold = "all",
        **params: Any,
    ) -> Request:
        """Renders a prompt and checks it; see `generate` for the arguments.

        Raises:
          RequestError: when the request can never run.
          ValueError: for a bad argument.
        """
        arm = Arm(arm)
        prompt = self.renderer.render(
            document, question, system=system, history=history, arm=arm.value
        )
        request = Request(
            prompt,
            dataclasses.replace(sampling or SamplingParams(), **params),
            arm=arm,
            forced=self._token_ids(forced),
            answer_mode=answer_mode,
            scaffold=scaffold,
        )
        self.engine.check(request)
        return request

    def stream(
        self, document: Document, question: str, **options: Any
    ) -> Generator[Event, None, None]:
        """Answers one question, yielding events as they happen; the last one is `Done`.

        Takes the options of `generate`. Closing the iterator cancels the request.
        """
        return self.engine.run([self.request(document, question, **options)])

    def generate(
        self, document: Document | Sequence[Document], question: str | Sequence[str], **options: Any
    ) -> Any:
        """Answers a question about a document, or many at once.

        Args:
          document: a text, which is cut into chunks, or a list of the caller's own chunks. With a
            list of questions: one text for all of them, or a list with one document for each.
          question: one question, or a list.
          arm: `da`, `unmasked` (same prompt, everything visible) or `vanilla` (plain prompt).
          sampling: a `SamplingParams`; or give its fields as keywords, such as `max_tokens=64`.
          system: a system message.
          history: earlier turns, {"role", "content"}.
          forced: the beginning of the response, text or token ids, fed as if the model wrote it.
          answer_mode: what `<answer>` does: `local`, `keep` or `global`.
          scaffold: what stays visible besides chunks: `all`, or `paper`.

        Returns:
          A `Response`, or a list of them in the order of the questions.

        Raises:
          RequestError: for a request that can never run, before anything is computed.
          ValueError: for a bad argument, or when documents and questions differ in number.
        """
        if isinstance(question, str):
            return self._responses([self.request(document, question, **options)])[0]  # type: ignore
        one = isinstance(document, str)
        documents = [document] * len(question) if one else list(document)
        if len(documents) != len(question):
            raise ValueError(
                f"{len(documents)} documents for {len(question)} questions; give one document "
                "as a text, or a list with one for each question"
            )
        requests = []
        for index, (text, words) in enumerate(zip(documents, question)):
            try:
                requests.append(self.request(text, words, **options))  # type: ignore[arg-type]
            except RequestError as error:
                raise RequestError(f"question {index}: {error}") from error
        return self._responses(requests)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        documents: Document = "",
        **options: Any,
    ) -> Response:
        """Answers the last message of a conversation about documents.

        Args:
          messages: {"role", "content"} in order: an optional system message first, then turns; the
            last one is the user's question.
          documents: a text, or a list of texts that become the chunks.
          **options: those of `generate`, apart from `system` and `history`.

        Raises:
          ValueError: for a message without role or text, or when the last one is not the user's.
          RequestError: for a request that can never run.
        """
        for index, message in enumerate(messages):
            if not isinstance(message.get("content"), str) or "role" not in message:
                raise ValueError(
                    f"message {index} is {dict(message)!r}; it needs a role and a text content"
                )
        system = None
        if messages and messages[0]["role"] == "system":
            system, messages = messages[0]["content"], messages[1:]
        if not messages or messages[-1]["role"] != "user":
            raise ValueError("the last message must be the user's question (role 'user')")
        *history, last = messages
        return self.generate(documents, last["content"], system=system, history=history, **options)

    def score(
        self,
        document: Document,
        question: str,
        response: str | Sequence[int],
        *,
        arm: Arm | str = Arm.DA,
        system: str | None = None,
        history: Sequence[Mapping[str, str]] = (),
        answer_mode: AnswerMode = "local",
        scaffold: Scaffold = "all",
    ) -> np.ndarray:
        """Log-probabilities of a given response, token by token, under its own declarations.

        Args:
          document, question, arm, system, history, answer_mode, scaffold: as in `generate`.
          response: text or token ids.

        Returns:
          float32 [n], natural logarithm; n is the number of tokens of the response.

        Raises:
          RequestError: when prompt and response do not fit.
        """
        ids = self._token_ids(response)
        request = self.request(
            document, question, arm=arm, system=system, history=history, answer_mode=answer_mode,
            scaffold=scaffold, forced=ids, max_tokens=max(len(ids), 1), logprobs=0,
        )  # fmt: skip
        if not ids:
            return np.zeros(0, np.float32)
        logprobs = self._responses([request])[0].logprobs
        return np.array([entry.logprob for entry in logprobs], np.float32)

    def _token_ids(self, text: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(text, str):
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return tuple(text)

    def _responses(self, requests: list[Request]) -> list[Response]:
        done = {e.request_id: e.response for e in self.engine.run(requests) if isinstance(e, Done)}
        return [response for _, response in sorted(done.items())]


def load_tokenizer(folder: Path) -> Any:
    """The fast Hugging Face tokenizer of a checkpoint folder."""
    # transformers advises to install torch, which da-jax has no use for.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def stop_token_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a response: of the generation config, else of the tokenizer.

    Raises:
      ValueError: when the checkpoint names none; it would never stop by itself.
    """
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.exists() else None
    if ids is None:
        ids = tokenizer.eos_token_id
    if ids is None or ids == []:
        raise ValueError(
            f"{folder} names no end-of-sequence token; set eos_token_id in generation_config.json"
        )
    return frozenset([ids] if isinstance(ids, int) else ids)


def _dtype(name: str) -> jnp.dtype:
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)
