"""A remedy that the model's attention refuses ends a Trainer's training before its first step."""

import pytest
import transformers
from tests.contract.integrations.test_huggingface import trained

from qkeel.errors import UnknownNameError
from qkeel.integrations.huggingface import QkeelCallback
from qkeel.remedies.lalr import LALR


class CountedSteps(transformers.TrainerCallback):
    """Counts the optimizer's steps."""

    done = 0

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.done += 1


@pytest.mark.filterwarnings("ignore")
def test_a_remedy_for_a_layer_that_is_not_there_ends_the_training():
    steps = CountedSteps()
    absent = LALR(heads=(("transformer.h.7.attn", ()),))
    with pytest.raises(UnknownNameError, match="unknown site of lalr"):
        trained(steps, QkeelCallback(remedy=absent))
    assert not steps.done
