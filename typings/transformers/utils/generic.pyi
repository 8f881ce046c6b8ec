from collections import OrderedDict
from typing import Any

class ModelOutput(OrderedDict[str, Any]): ...
