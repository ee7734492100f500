"""A second checker, in Python, for the graph of TLC or of the shipped machines.

Each property is implemented a second time, from the words of the specification, and liveness by strongly connected
components. The verdicts must agree with those of TLC, which has known faults.
"""

from modelcheck.second.bounds import Bounds
from modelcheck.second.dump import Dump, Dumped, DumpError, GraphRun, Model
from modelcheck.second.examination import Broken, Question, examine
from modelcheck.second.graph import Graph, Label
from modelcheck.second.judgement import SecondVerdict, judge_again, question_of, story
from modelcheck.second.suite import SecondSuite, second_line, second_summary
from modelcheck.second.words import Node

__all__ = [
    "Bounds",
    "Broken",
    "Dump",
    "DumpError",
    "Dumped",
    "Graph",
    "GraphRun",
    "Label",
    "Model",
    "Node",
    "Question",
    "SecondSuite",
    "SecondVerdict",
    "examine",
    "judge_again",
    "question_of",
    "second_line",
    "second_summary",
    "story",
]
