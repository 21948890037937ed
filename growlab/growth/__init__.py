"""Growth methods, schedules and growth events (the surgery that widens a network in place)."""

from growlab.growth.event import anneal_norms, draw_seed, finish, grow, make_seed, restore
from growlab.growth.expressivity import Bottleneck, bottlenecks, measurable, out_of_reach
from growlab.growth.measurement import Measurement
from growlab.growth.method import GrownTensors, GrowthContext, GrowthMethod, NewWeights, WidthDecision
from growlab.growth.methods.baselines import FixedSize, RandomGrowth
from growlab.growth.methods.bert2bert import Bert2Bert
from growlab.growth.methods.firefly import FireFly
from growlab.growth.methods.gradmax import GradMax
from growlab.growth.methods.hypercloning import HyperCloning
from growlab.growth.methods.lemon import Lemon
from growlab.growth.methods.net2net import Net2Net
from growlab.growth.methods.pairs import PairGrowth
from growlab.growth.methods.splitting import Splitting
from growlab.growth.methods.tiny import Tiny
from growlab.growth.methods.variance_transfer import VarianceTransfer
from growlab.growth.schedule import Schedule, make_schedule
from growlab.growth.state import GrowthEvent, GrowthState, ParityError

__all__ = [
    "Bert2Bert",
    "Bottleneck",
    "FireFly",
    "FixedSize",
    "GradMax",
    "GrownTensors",
    "GrowthContext",
    "GrowthEvent",
    "GrowthMethod",
    "GrowthState",
    "HyperCloning",
    "Lemon",
    "Measurement",
    "Net2Net",
    "NewWeights",
    "PairGrowth",
    "ParityError",
    "RandomGrowth",
    "Schedule",
    "Splitting",
    "Tiny",
    "VarianceTransfer",
    "WidthDecision",
    "anneal_norms",
    "bottlenecks",
    "draw_seed",
    "finish",
    "grow",
    "make_schedule",
    "make_seed",
    "measurable",
    "out_of_reach",
    "restore",
]
