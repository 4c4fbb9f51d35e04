from narthex.api import Explanation as Explanation
from narthex.api import InputError as InputError
from narthex.api import check as check
from narthex.api import load as load
from narthex.api import plan as plan
from narthex.api import render as render
from narthex.api import trace as trace

__version__: str
