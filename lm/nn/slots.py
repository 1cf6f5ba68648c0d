"""The kinds of the slots of a model, imported so that each is registered. A new file is one line here."""

from lm.nn import block as block
from lm.nn import hyper as hyper
from lm.nn import residual as residual
from lm.nn.ffn import beside as beside
from lm.nn.ffn import mlp as mlp
from lm.nn.ffn import moe as moe
from lm.nn.ffn import none as none
from lm.nn.mixers import differential as differential
from lm.nn.mixers import gated_delta as gated_delta
from lm.nn.mixers import gla as gla
from lm.nn.mixers import gqa as gqa
from lm.nn.mixers import mamba as mamba
from lm.nn.mixers import mamba2 as mamba2
from lm.nn.mixers import mla as mla
from lm.nn.mixers import rg_lru as rg_lru
from lm.nn.mixers import short_conv as short_conv
from lm.nn.position import absolute as absolute
from lm.nn.position import bias as bias
from lm.nn.position import rope as rope
