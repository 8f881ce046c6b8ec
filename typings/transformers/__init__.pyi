# What the package uses of transformers. pyright reads these stubs instead of its hundreds of modules, which import torch:
# it then takes two thirds of the CPU time.
from typing import Any

from torch import nn

class AutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> nn.Module: ...
