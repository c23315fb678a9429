"""Names for runs that get none from their user: two words and a number, which people can say."""

from __future__ import annotations

import os
import random
from pathlib import Path

_FIRST = (
    "amber bold brave bright brisk calm clear clever cool copper coral cosmic crisp curious daring deep dusty eager "
    "early easy fair fast fine fresh gentle glad golden grand green happy honest humble jolly keen kind late light "
    "lively lucky mellow merry mild misty neat noble olive patient plain polite proud quick quiet rapid ready rosy "
    "ruby rustic sharp silent silver simple smart smooth snowy solid steady sunny swift tender tidy tiny velvet "
    "vivid warm wild wise young"
)
_SECOND = (
    "acorn ant aspen badger bay beach bear beech birch bison bloom breeze brook canyon cedar cliff cloud comet "
    "coral crane creek crow dawn deer delta dove dune eagle elm ember falcon fern field finch fjord forest fox "
    "frost garden glade grove harbor hare hawk hazel heron hill island ivy jay lake lark leaf lily lynx maple marsh "
    "meadow moon moss mountain newt oak ocean orchid otter owl panda pearl pebble pine plover pond puffin quail "
    "rain raven reef ridge river robin sage seal shore sky snow sparrow spring star stone storm stream summit swan "
    "thistle tide trail trout valley violet wave willow wind wolf wren"
)


def spoken_name(folder: Path) -> str:
    """A name for the next run in ``folder``, such as ``amber-otter-12``; the number counts the runs there."""
    draw = random.SystemRandom()  # not the generator that the notebook has seeded
    try:
        count = sum(entry.is_dir() for entry in os.scandir(folder))
    except OSError:
        count = 0
    return f"{draw.choice(_FIRST.split())}-{draw.choice(_SECOND.split())}-{count + 1}"
