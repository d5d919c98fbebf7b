"""`LLM`: a checkpoint, its tokenizer and prompt style, and the engine, behind a few methods."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from da_jax.checkpoints import convert, paths
from da_jax.engine import compilations
from da_jax.engine.config import EngineConfig
from da_jax.engine.conversation import Conversation
from da_jax.engine.detokenize import TokenTable
from da_jax.engine.engine import Engine, RequestError
from da_jax.engine.memory import MemoryPlan, device_memory
from da_jax.engine.replicas import Replicas
from da_jax.engine.request import Done, Event, Request, Response, SamplingParams
from da_jax.kernels.chips import current_target
from da_jax.kernels.paged_attention import choose
from da_jax.models import dtypes, hf_config, host_table, parallel, sharding, sizes
from da_jax.models.config import ModelConfig
from da_jax.models.decoder import Decoder
from da_jax.protocol import turns
from da_jax.protocol.chunks import Chunk
from da_jax.protocol.modes import AnswerMode, Arm, Declaration, Mode
from da_jax.protocol.prompt import PromptRenderer
from da_jax.protocol.styles import Style
from da_jax.protocol.tags import THINK_ENDS, THINK_STARTS
from da_jax.protocol.visibility import Scaffold

PER_LAYER = "per_layer_embedding"  # path of Gemma 4's table of per-layer embeddings
Document = str | Sequence[str | Chunk] | None
Progress = Callable[[str, int, int], None]
_IN_MESSAGES = {
    "document": "`documents`",
    "question": "the last message",
    "system": "the first message, with the role 'system'",
    "history": "the messages before the last one",
    "chunks": "'chunks' of the message that they come with",
}


class LLM:
    """A language model that reads only the KV pages that it declared.

    Args:
      model: the model; or several copies of it, each on devices of its own.
      tokenizer: its fast Hugging Face tokenizer, with a chat template.
      stop_ids: tokens that end a response.
      style: how prompts are written, see `PromptRenderer`.
      config: settings of the engine.
      thinking: whether the model thinks before it answers. Its thoughts are part of the text of a
        response, up to `</think>` or `<channel|>`, and not of the answer.
      template_kwargs: passed to the chat template, such as `{"reasoning_effort": "low"}`.
      progress: called with (stage, done, total) while programs compile.

    Attributes:
      engine: runs the requests; of several replicas the first.
      loop: takes requests: the engine, or all replicas.

    Raises:
      ValueError: a setting, a style or a chat template that cannot work.
    """

    def __init__(
        self,
        model: Decoder | Sequence[Decoder],
        tokenizer: Any,
        stop_ids: frozenset[int],
        *,
        style: Style | str = "auto",
        config: EngineConfig | None = None,
        thinking: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: Progress = lambda stage, done, total: None,
    ):
        compilations.keep()
        self.tokenizer = tokenizer
        self.renderer = PromptRenderer(
            tokenizer, style, thinking=thinking, template_kwargs=template_kwargs
        )
        # Without their markers thoughts would run into the answer, and stay in later turns.
        table = TokenTable.from_tokenizer(tokenizer, shown=(*THINK_STARTS, *THINK_ENDS))
        models = [model] if isinstance(model, Decoder) else model
        ids = itertools.count()
        engines = [Engine(m, table, stop_ids, config or EngineConfig(), ids=ids) for m in models]
        self.engine = engines[0]
        self.loop = self.engine if len(engines) == 1 else Replicas(engines)
        self.loop.warm_up(lambda done, total: progress("compiling", done, total))
        self._compiled = compilations.count()

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path = "tiny",
        *,
        style: Style | str = "auto",
        revision: str | None = None,
        thinking: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        progress: Progress = lambda stage, done, total: None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> LLM:
        """Loads a checkpoint.

        Args:
          path_or_id: a Hugging Face or Orbax folder (Orbax also on `gs://`), a hub id, or `tiny`,
            which ships with the package.
          style: `auto` takes the checkpoint's own style, else the native tool calls of its
            template, else `plain`.
          revision: branch, tag or commit on the hub.
          thinking: whether the model thinks before it answers; an error where its chat template
            cannot do what is asked.
          template_kwargs: passed to the chat template, such as `{"reasoning_effort": "low"}`.
          progress: called with (stage, done, total).
          config: settings of the engine; or give its fields as keyword `options`.
          **options: fields of `EngineConfig`, such as `max_model_len=8192`.

        Raises:
          FileNotFoundError, ConfigError, CheckpointError: what is wrong with the checkpoint.
          ValueError: a setting that cannot work.
          BackendError: the attention backend cannot run here, or not this model.
        """
        config = dataclasses.replace(config or EngineConfig(), **options)
        compilations.keep()
        # What cannot run here is refused before anything is loaded.
        choose(config.attention)
        dtypes.resolve_kv(config.kv_dtype, "", current_target())
        parallel.mesh(config.tensor_parallel, config.data_parallel - 1)
        progress("loading", 0, 1)
        folder = convert.resolve(path_or_id, revision=revision)
        models = [load_model(folder, config, replica) for replica in range(config.data_parallel)]
        local = paths.local_metadata(folder)
        tokenizer = load_tokenizer(local)
        progress("loading", 1, 1)
        return cls(
            models,
            tokenizer,
            stop_token_ids(local, tokenizer),
            style=style,
            config=config,
            thinking=thinking,
            template_kwargs=template_kwargs,
            progress=progress,
        )

    @property
    def memory(self) -> MemoryPlan:
        """What is on the device, and how many tokens it holds.

        Where several share the model it is that of each, and of several replicas the first one's.
        """
        return self.engine.memory

    @property
    def compilations_after_warmup(self) -> int:
        """Programs that this process compiled since the engine was ready; 0 unless others did."""
        return compilations.count() - self._compiled

    def follow(self) -> None:
        """Serves process 0, which runs the engine, until it ends or calls `stop`.

        Where several processes share a model, one on each host, all of them load it. Process 0 then
        answers requests; all others call this, once and at once, for it waits for them.

        Raises:
          RuntimeError: in process 0.
        """
        self.engine.runner.follow()

    def stop(self) -> None:
        """Ends `follow` in all other processes. It is called when process 0 ends, also by an error.

        Nothing can be generated afterwards. With one process it does nothing.
        """
        self.engine.runner.stop()

    def request(
        self,
        document: Document,
        question: str,
        *,
        arm: Arm | str = Arm.DA,
        sampling: SamplingParams | None = None,
        system: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        chunks: Sequence[str | Chunk] = (),
        forced: str | Sequence[int] = (),
        answer_mode: AnswerMode = "local",
        scaffold: Scaffold = "all",
        priority: int = 0,
        deadline: float | None = None,
        initial: Declaration | Mode | str | None = None,
        visible: Sequence[int] | None = None,
        **params: Any,
    ) -> Request:
        """Renders a prompt and checks it; see `generate` for the arguments.

        Raises:
          RequestError: when the request can never run.
          ValueError: for a bad argument.
        """
        arm = Arm(arm)
        prompt = self.renderer.render(
            document, question, chunks=chunks, system=system, history=history, arm=arm.value
        )
        request = Request(
            prompt,
            dataclasses.replace(sampling or SamplingParams(), **params),
            arm=arm,
            forced=self._token_ids(forced),
            answer_mode=answer_mode,
            scaffold=scaffold,
            priority=priority,
            deadline=deadline,
            initial=None if initial is None else Declaration.of(initial),
            visible=None if visible is None else _chunk_ids(visible),
        )
        self.loop.check(request)
        return request

    def stream(
        self, document: Document, question: str, **options: Any
    ) -> Generator[Event, None, None]:
        """Answers one question, yielding events as they happen; the last one is `Done`.

        Takes the options of `generate`. Closing the iterator cancels the request.
        """
        return self.loop.run([self.request(document, question, **options)])

    def generate(
        self, document: Document | Sequence[Document], question: str | Sequence[str], **options: Any
    ) -> Any:
        """Answers a question about a document, or many at once.

        Args:
          document: a text, which is cut into chunks, or a list of the caller's own chunks, or None
            for no document. With a list of questions: one text (or None) for all of them, or a
            list with one document for each.
          question: one question, or a list.
          arm: `da`, `unmasked` (same prompt, everything visible) or `vanilla` (plain prompt).
          sampling: a `SamplingParams`; or give its fields as keywords, such as `max_tokens=64`.
          system: a system message.
          history: earlier turns, {"role", "content"}; a user's turn may have "chunks" that came
            with it, see `conversation`.
          chunks: chunks that come with the question, after those of the document and the history.
          forced: the beginning of the response, text or token ids, fed as if the model wrote it.
          answer_mode: what `<answer>` does: `local`, `keep` or `global`.
          scaffold: what stays visible besides chunks: `all`, or `paper`.
          priority: smaller goes first; among equals whoever came first.
          deadline: seconds after which the response ends with what it has.
          initial: the mode that the response starts in: a `Declaration`, "local", "focus:3,7"; its
            own tags act from there. Arm `da` only.
          visible: numbers of the chunks that the whole response sees, whatever it declares; () is
            none. Arm `da` only, and not with `initial`.

        Returns:
          A `Response`, or a list of them in the order of the questions.

        Raises:
          RequestError: for a request that can never run, before anything is computed.
          ValueError: for a bad argument, or when documents and questions differ in number.
        """
        if isinstance(question, str):
            return self._responses([self.request(document, question, **options)])[0]  # type: ignore
        one = document is None or isinstance(document, str)
        documents = [document] * len(question) if one else list(document or ())
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
        messages: Sequence[Mapping[str, Any]],
        *,
        documents: Document = None,
        **options: Any,
    ) -> Response:
        """Answers the last message of a conversation about documents.

        Args:
          messages: {"role", "content"} in order: an optional system message first, then turns; the
            last one is the user's question. A user's turn may have "chunks" that come with it.
          documents: a text, or a list of texts that become the chunks; they stand first.
          **options: those of `generate`, apart from `system`, `history` and `chunks`.

        Raises:
          ValueError: for a message without role or text, when the last one is not the user's, or
            for an option whose place is a message.
          RequestError: for a request that can never run.
        """
        for name, where in _IN_MESSAGES.items():
            if name in options:
                raise ValueError(f"{name} is no option of `chat`; give it as {where}")
        parts = turns.split(messages)
        return self.generate(
            documents, parts.question, system=parts.system, history=parts.history,
            chunks=parts.chunks, **options,
        )  # fmt: skip

    def conversation(
        self, documents: Document = None, *, system: str | None = None, **options: Any
    ) -> Conversation:
        """Starts a conversation, whose later questions may bring chunks of their own.

        Args:
          documents: a text, or a list of chunks, that stand first; None for none.
          system: a system message.
          **options: those of `generate` for every question, apart from `history` and `chunks`.
        """
        return Conversation(self, documents, system=system, **options)

    def score(
        self,
        document: Document,
        question: str,
        response: str | Sequence[int],
        *,
        arm: Arm | str = Arm.DA,
        system: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        chunks: Sequence[str | Chunk] = (),
        answer_mode: AnswerMode = "local",
        scaffold: Scaffold = "all",
        initial: Declaration | Mode | str | None = None,
        visible: Sequence[int] | None = None,
    ) -> np.ndarray:
        """Log-probabilities of a given response, token by token, under its own declarations.

        Args:
          document, question, arm, system, history, chunks, answer_mode, scaffold, initial, visible:
            as in `generate`.
          response: text or token ids.

        Returns:
          float32 [n], natural logarithm; n is the number of tokens of the response.

        Raises:
          RequestError: when prompt and response do not fit.
        """
        ids = self._token_ids(response)
        request = self.request(
            document, question, arm=arm, system=system, history=history, chunks=chunks,
            answer_mode=answer_mode, scaffold=scaffold, initial=initial, visible=visible,
            forced=ids, max_tokens=max(len(ids), 1), logprobs=0,
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
        done = {e.request_id: e.response for e in self.loop.run(requests) if isinstance(e, Done)}
        return [response for _, response in sorted(done.items())]


def load_model(folder: str | os.PathLike[str], config: EngineConfig, replica: int = 0) -> Decoder:
    """Loads the weights as the settings say: their dtype, int8, what is where.

    Raises:
      ConfigError, CheckpointError: what is wrong with the checkpoint.
      ValueError: a setting that this model or device cannot have.
      HostMemoryError: the device cannot read host memory.
    """
    model = hf_config.read(paths.absolute(folder))
    dtype = dtypes.resolve(config.dtype, model.family, current_target())
    int8 = config.weights == "int8" or convert.is_int8(folder)
    devices = config.tensor_parallel
    mesh = parallel.mesh(devices, replica)
    sharding.check(model, devices)
    use = sizes.Use(dtype=dtype, int8=int8, devices=devices)
    host = _per_layer_on_host(model, config, use, mesh.local_devices[0])

    def place(path: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        there = NamedSharding(mesh, parallel.spec(model, path, devices))
        if host and path == PER_LAYER:
            return host_table.sharding(shape, jnp.dtype(jnp.bfloat16), there)
        return there

    return convert.load(
        folder, dtype=jnp.dtype(dtype), quantized=int8, shardings=place,
        as_stored=(PER_LAYER,) if host else (),
    )  # fmt: skip


def _per_layer_on_host(
    model: ModelConfig, config: EngineConfig, use: sizes.Use, device: jax.Device
) -> bool:
    where = config.per_layer_embeddings
    if where == "host" and model.per_layer_inputs is None:
        raise ValueError(
            f"per_layer_embeddings is 'host', but this {model.family} has none; use 'auto'"
        )
    if where != "auto" or device.platform == "cpu":
        return where == "host"
    memory = device_memory(device)
    return memory is not None and sizes.per_layer_on_host(model, use, memory)


def load_tokenizer(folder: Path) -> Any:
    """The fast Hugging Face tokenizer of a checkpoint folder.

    Raises:
      FileNotFoundError: when the folder has none; transformers would make an empty one.
    """
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).exists() for name in names):
        raise FileNotFoundError(
            f"{folder} has no tokenizer ({', '.join(names)}); copy those of the model there"
        )
    # transformers advises to install torch, which da-jax has no use for.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def stop_token_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a response.

    Those of `generation_config.json`; without it those of `config.json` (of its text part, where it
    is multimodal) and the tokenizer's, which often name the end of a text and of a turn.

    Raises:
      ValueError: when the checkpoint names none; it would never stop by itself.
    """
    path = folder / "generation_config.json"
    ids = _ids(hf_config.read_json(path).get("eos_token_id")) if path.exists() else frozenset()
    if not ids:
        config = hf_config.read_json(folder / "config.json")
        text = config.get("text_config") or {}
        own = _ids(config.get("eos_token_id")) or _ids(text.get("eos_token_id"))
        ids = own | _ids(tokenizer.eos_token_id)
    if not ids:
        raise ValueError(
            f"{folder} names no end-of-sequence token; set eos_token_id in generation_config.json"
        )
    return ids


def _chunk_ids(visible: Sequence[int]) -> tuple[int, ...]:
    """The numbers of chunks, each still to be checked.

    Raises:
      ValueError: for what is no sequence, such as one number.
    """
    if isinstance(visible, str) or not isinstance(visible, Iterable):
        raise ValueError(
            f"visible is {visible!r}; give the numbers of chunks in a sequence, such as (3, 7)"
        )
    return tuple(visible)


def _ids(value: int | Sequence[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
