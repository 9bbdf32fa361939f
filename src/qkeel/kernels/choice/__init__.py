"""Which kernel "auto" tries first, by measured tables. Knows kernels by name alone."""

from qkeel.kernels.choice.order import Order, Steps, ordered, steps
from qkeel.kernels.choice.question import Form, Question, Statistics, question

__all__ = ["Form", "Order", "Question", "Statistics", "Steps", "ordered", "question", "steps"]
