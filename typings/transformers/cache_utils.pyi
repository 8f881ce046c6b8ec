from typing import Any

class Cache:
    layers: list[Any]

class StaticCache(Cache):
    def __init__(self, config: Any, max_cache_len: int) -> None: ...

class StaticLayer:
    def __init__(self, max_cache_len: int) -> None: ...
