"""Several places that build on each other: variables, graphs, and who carries what where."""

from __future__ import annotations

import re

from da_jax.evals.offline import filler, scoring, words
from da_jax.evals.offline.draft import Draft, Evidence, Generated, drawn_depths, join, scatter
from da_jax.evals.offline.stream import Stream
from da_jax.evals.task import Example, Group, Score

_HOPS = 4
_CHAINS = 3


class VariableTracking(Generated):
    """RULER's variable tracking: all variables that have a value, through assignments.

    One chain of assignments is asked for, two others have other values. The chains are mixed; each
    keeps its order.
    """

    name = "variable_tracking"
    group = Group.MULTI
    description = "All variables that get a value through a chain of assignments."

    def draft(self, stream: Stream, units: int) -> Draft:
        length = _HOPS + 1
        at = drawn_depths(stream, _CHAINS * length)
        values = [str(10000 + i) for i in stream.distinct(_CHAINS, 90000)]
        variables: dict[str, None] = {}
        while len(variables) < _CHAINS * length:
            variables[stream.letters(5, "ABCDEFGHIJKLMNOPQRSTUVWXYZ")] = None
        every = list(variables)
        chains = [every[i * length : (i + 1) * length] for i in range(_CHAINS)]
        lines: list[str] = []
        done = [0] * _CHAINS
        for which in stream.shuffled(sorted([*range(_CHAINS)] * length)):
            step = done[which]
            done[which] += 1
            source = values[which] if step == 0 else f"VAR {chains[which][step - 1]}"
            line = f"VAR {chains[which][step]} = {source}\n"
            lines.append(Evidence(line) if which == 0 else line)
        document, evidence = join(scatter(filler.noise(stream, units), lines, at))
        question = (
            f"Which variables have the value {values[0]}, directly or through other variables? "
            f'There are {length} of them. Give the answer as "Answer:" followed by their names.'
        )
        return Draft(document, question, tuple(sorted(chains[0])), evidence)

    def score(self, example: Example, answer: str) -> Score:
        variables = re.findall(r"VAR (\w+) =", example.text)
        return scoring.exact(scoring.among(variables), answer, example.expected)


class Graphwalks(Generated):
    """A graph as a list of edges: the nodes at a distance of two, or the parents; as in OpenAI's.

    A unit is an edge besides those that are asked for. Scored by F1, as its owner does.
    """

    name = "graphwalks"
    group = Group.MULTI
    description = "The nodes two steps from a node of a directed graph, or its parents."
    _digits = 10

    def draft(self, stream: Stream, units: int) -> Draft:
        nodes: dict[str, None] = {}
        while len(nodes) < 12 + units // 2:
            nodes[self._node(stream)] = None
        every = list(nodes)
        start = every[0]
        if stream.below(2):
            operation = "parents"
            count = 3 + stream.below(3)
            expected = every[1 : 1 + count]
            asked = [(parent, start) for parent in expected]
            sources, targets = every, every[1:]
            question = f"Which nodes have an edge that leads to the node {start} (its parents)?"
        else:
            operation = "bfs"
            middle, expected = every[1:3], every[3 : 6 + stream.below(3)]
            asked = [(start, node) for node in middle]
            asked += [(middle[i % 2], node) for i, node in enumerate(expected)]
            sources, targets = every[3:], every
            question = (
                f"Which nodes does a breadth-first search from the node {start} reach at depth 2, "
                "that is, in two steps and not in fewer?"
            )
        edges = dict.fromkeys(asked)
        while len(edges) < len(asked) + units:
            source, target = stream.pick(sources), stream.pick(targets)
            if source != target:
                edges[source, target] = None
        lines = [f"{source} -> {target}\n" for source, target in edges]
        lines[: len(asked)] = map(Evidence, lines[: len(asked)])
        document, evidence = join(stream.shuffled(lines))
        return Draft(
            document,
            "The text lists the edges of a directed graph. " + question + " The node itself is "
            'not one of them. Give the answer as "Answer:" followed by the list of nodes.',
            tuple(sorted(expected)),
            evidence,
            {"operation": operation, "start": start},
        )

    def score(self, example: Example, answer: str) -> Score:
        find = scoring.matches(rf"[0-9a-f]{{{self._digits}}}")
        return scoring.overlap(find, answer, example.expected, named=[example.details["start"]])

    def _node(self, stream: Stream) -> str:
        return stream.letters(self._digits, "0123456789abcdef")


class Babilong2(Generated):
    """Two supporting facts in real prose, as in BABILong's qa2: where is the thing?

    Three people walk between rooms, each picks up one thing. The answer follows from who picked
    the thing up, and from where that person went last.
    """

    name = "babilong_2"
    group = Group.MULTI
    description = "The room of a thing, from who picked it up and where that person went last."
    _walks = 4

    def draft(self, stream: Stream, units: int) -> Draft:
        people = stream.some(3, words.FIRST_NAMES)
        things = stream.some(3, words.THINGS)
        turns = stream.shuffled(sorted([*range(3)] * (self._walks + 1)))
        at = drawn_depths(stream, len(turns))
        # Each picks the thing up between its first walk and its last.
        picks = [1 + stream.below(self._walks - 1) for _ in people]
        rooms = [""] * 3
        done = [0] * 3
        facts: list[str] = []
        for who in turns:
            step = done[who]
            done[who] += 1
            if step == picks[who]:
                fact = f"{people[who]} picked up the {things[who]}. "
            else:
                rooms[who] = stream.pick([room for room in words.ROOMS if room != rooms[who]])
                fact = f"{people[who]} went to the {rooms[who]}. "
            asked = who == 0 and step in (picks[0], self._walks)
            facts.append(Evidence(fact) if asked else fact)
        document, evidence = join(scatter(filler.prose(stream, units), facts, at))
        question = (
            f"{people[0]}, {people[1]} and {people[2]} walk through a house in the course of the "
            "text. People keep what they pick up. Where "
            f'is the {things[0]} at the end? Give the answer as "Answer:" followed by the room: '
            f"{', '.join(words.ROOMS[:-1])} or {words.ROOMS[-1]}."
        )
        return Draft(document, question, (rooms[0],), evidence)

    def score(self, example: Example, answer: str) -> Score:
        return scoring.exact(scoring.listed(words.ROOMS), answer, example.expected)
