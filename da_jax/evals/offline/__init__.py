"""offline15: fifteen tasks that are generated, scored exactly, and need no download; and controls.

Every example follows from (task, seed, length, index) and the tokenizer, which says how much text
fits the length; it is the same on every machine and Python. Models with other tokenizers get other
documents, and in some tasks other answers to the same question.
The split into one place and several is that of the paper's fifteen sources. Five tasks are of the
same kind as theirs (RULER's needles); the others stand in for sources whose questions an LLM wrote
and a judge scores.

| task | group | what it asks | scored by |
|---|---|---|---|
| niah_single_noise | single | number of a named thing, in sentences that say nothing | exact |
| niah_single_prose | single | number of a named thing, in real prose | exact |
| niah_single_uuid | single | UUID of a named thing, in real prose | exact |
| niah_multikey_2 | single | number of a named thing, among numbers of others | exact |
| niah_multikey_3 | single | UUID of a UUID, among UUIDs of others | exact |
| kv_retrieval | single | value of a key in a JSON object of UUIDs | exact |
| passkey | single | the number that a text says to remember | exact |
| mrcr_2 | single | first line of the first or second of two texts alike, word for word | likeness |
| meeting_qa | single | who takes on a project, for how much, until when, in minutes | exact |
| code_lookup | single | what a function of a long module returns | exact |
| variable_tracking | multi | all variables that get a value through assignments | exact set |
| graphwalks | multi | nodes two steps from a node of a graph, or its parents | F1 |
| babilong_2 | multi | room of a thing, from who took it and where that person went | exact |
| counting | multi | how many messages of one user carry one label | exact |
| dialogue_cloze | multi | a name left out, from two turns of a dialogue | exact |
| common_words | control | the ten made-up words that come most often in a list | F1 |
| frequent_words | control | the three most frequent of made-up words | F1 |
| structured_data | control | the region with the greatest sum over all rows of a table | exact |

How answers are read is told in `scoring`. Questions leave room for reasoning, and ask that the
answer be given as "Answer:" followed by its value. They do not ask to end with that: what is scored
of a response that declares is its last `<answer>` or LOCAL text, as the protocol has it, and where
it ends is for the instructions to say. Nothing else of such a response is looked at, since a value
that it wrote outside of its answer is not what a caller would get; the report says how often that
happens, in every arm. No value is longer than the 12 words that a response copies in a focus.

`max_tokens` is 1,024 in every arm, where RULER has 30 to 128, because a model that declares reasons
first. The prose is public domain, see NOTICE beside this file.
"""

from __future__ import annotations

from da_jax.evals.offline.controls import CommonWords, FrequentWords, StructuredData
from da_jax.evals.offline.gathering import Counting, DialogueCloze
from da_jax.evals.offline.lookups import CodeLookup, MeetingQa, Mrcr2
from da_jax.evals.offline.needles import (
    KvRetrieval,
    NiahMultikey2,
    NiahMultikey3,
    NiahSingleNoise,
    NiahSingleProse,
    NiahSingleUuid,
    Passkey,
)
from da_jax.evals.offline.tracing import Babilong2, Graphwalks, VariableTracking
from da_jax.evals.task import Task

_SUITE: tuple[Task, ...] = (
    NiahSingleNoise(),
    NiahSingleProse(),
    NiahSingleUuid(),
    NiahMultikey2(),
    NiahMultikey3(),
    KvRetrieval(),
    Passkey(),
    Mrcr2(),
    MeetingQa(),
    CodeLookup(),
    VariableTracking(),
    Graphwalks(),
    Babilong2(),
    Counting(),
    DialogueCloze(),
)
_CONTROLS: tuple[Task, ...] = (CommonWords(), FrequentWords(), StructuredData())

TASKS: dict[str, Task] = {task.name: task for task in _SUITE}
"""offline15 by name, in order."""

CONTROLS: dict[str, Task] = {task.name: task for task in _CONTROLS}
"""Tasks that are not expected to gain, by name."""
