"""Read recipes from YAML into frozen dataclasses and write them back, for any settings class.

No key is ignored: an unknown one is refused with a suggestion, a wrong type with its dotted path. A recipe may extend
another one (`base: tiny`), and `key=value` overrides come last. Recipes that ship with the package are found by name.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from dovetail.core import yaml_text
from dovetail.core.choice import did_you_mean
from dovetail.core.errors import RecipeError, UserError
from dovetail.core.overrides import Typed, flat, kind_of, parsed, place, split

T = TypeVar("T")
NOT_A_KEY = {"is_key": False}  # metadata of a field that a program fills in and a recipe cannot set
Count = Annotated[int, "count"]  # an int that may be written as 10B, 300M or 4k

SHIPPED = Path(__file__).parents[1] / "recipes"
TRAININGS = ("pretrain", "sft", "dpo", "reward", "distill", "rl", "draft")  # each is a command, and a class of settings
_QUANTIZATIONS = ("bf16", "f32", "int8", "nf4")  # values that the key `base` had before it meant a parent recipe only
_SUFFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


# --- finding and layering ---------------------------------------------------------------------------------------------


def shipped(training: str = "pretrain") -> tuple[str, ...]:
    """Return the names of the recipes for this training that come with the package."""
    folder = SHIPPED if training == "pretrain" else SHIPPED / training
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def training_of(name: str) -> str | None:
    """Return the training that a shipped recipe is for; None where no recipe of this name is shipped."""
    return next((training for training in TRAININGS if name in shipped(training)), None)


def find(name_or_path: str, beside: Path | None = None, training: str = "") -> Path:
    """Return the file of a recipe.

    Args:
        name_or_path: A shipped name, or a path.
        beside: The folder that a path is relative to, for the base of a recipe.
        training: The training that asks; an error lists its recipes alone.
    """
    if found := training_of(name_or_path):
        return (SHIPPED if found == "pretrain" else SHIPPED / found) / f"{name_or_path}.yaml"
    path = (beside or Path()) / Path(name_or_path).expanduser()
    if path.is_file():
        return path
    looked = "no such file" if path.suffix in (".yaml", ".yml") else "neither a file nor shipped"
    names = [name for each in TRAININGS for name in shipped(each) if training in ("", each)]
    hint = did_you_mean(Path(name_or_path).stem, names)
    raise RecipeError(f"no recipe {name_or_path!r}: {looked}.{hint} Shipped: {', '.join(names)}", param="recipe")


def load(name_or_path: str, overrides: Sequence[str] | Mapping[str, Any], cls: type[T]) -> T:
    """Read a recipe as settings of class `cls`.

    Args:
        name_or_path: A shipped name, or a path.
        overrides: `key=value` texts, or a mapping of values.
        cls: The settings class.

    Raises:
        RecipeError: With the dotted path of the key at fault in `param`.
    """
    wanted = cls.__name__.lower() if cls.__name__.lower() in TRAININGS else ""
    meant = training_of(name_or_path)
    if wanted and meant and wanted != meant:
        raise RecipeError(
            f"recipe {name_or_path} is for `dovetail {meant}`, not for `dovetail {wanted}`. Shipped for that: "
            f"{', '.join(shipped(wanted))}"
        )
    mapping = _with_base(find(name_or_path, training=wanted), cls, ())
    try:
        return _overridden(cls, mapping, overrides)
    except UserError as error:
        raise RecipeError(f"recipe {name_or_path}: {error}", param=error.param, code=error.code) from error


def raw(name_or_path: str, cls: type = object) -> dict[str, Any]:
    """Return the keys of a recipe and of its bases as a mapping; `cls` is a settings class that has them."""
    return _with_base(find(name_or_path), cls, ())


def create(cls: type[T], given: Sequence[str] | Mapping[str, Any]) -> T:
    """Return settings of class `cls` from these values alone (see `load`)."""
    return _overridden(cls, {}, given)


def change(settings: T, overrides: Sequence[str] | Mapping[str, Any]) -> T:
    """Return a copy of the settings with some keys changed."""
    return _overridden(type(settings), dump(settings), overrides)


def _overridden(cls: type[T], mapping: Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any]) -> T:
    pairs = flat(overrides) if isinstance(overrides, Mapping) else [split(text) for text in overrides]
    pairs = [(_whole_path(cls, path, value), value) for path, value in pairs]
    below = _without_rivals(cls, mapping, [path[0] for path, _ in pairs])
    below = _without_texts(cls, below, {path[0] for path, _ in pairs if len(path) > 1})
    return read(cls, place(below, pairs))


def _without_texts(cls: type, below: Mapping[str, Any], sections: Collection[str]) -> Mapping[str, Any]:
    """Remove texts from `below` whose key is now given as a section: `model.torch=a:b` replaces `model: tiny`."""
    hints = typing.get_type_hints(cls)
    gone = {key for key in sections if isinstance(below.get(key), str) and section_of(hints.get(key))}
    return {key: value for key, value in below.items() if key not in gone} if gone else below


def _whole_path(cls: type, path: list[str], value: Any) -> list[str]:
    """Return the path of a section's main key if text is given for the section: `data=chats.jsonl` sets data.path."""
    text = parsed(value) if isinstance(value, Typed) else value
    if len(path) > 1 or not isinstance(text, str) or not has_key(cls, path[0]):
        return path
    main = getattr(section_of(typing.get_type_hints(cls)[path[0]]), "MAIN", None)
    return [*path, main] if main else path


def _with_base(path: Path, cls: type, above: tuple[Path, ...]) -> dict[str, Any]:
    if path in above:
        chain = " -> ".join(p.name for p in (*above, path))
        raise RecipeError(f"recipe {path.name}: `base` must not form a cycle, got {chain}", param="base")
    try:
        mapping = yaml_text.parse(path.read_text())
    except RecipeError as error:
        raise RecipeError(f"recipe {path}: {error}", param=error.param) from error
    if not isinstance(mapping, dict):
        raise RecipeError(f"recipe {path}: a recipe is a mapping of keys to values; this is {kind_of(mapping)}")
    if dataclasses.is_dataclass(cls):
        whole = {key: _whole_path(cls, [str(key)], value)[1:] for key, value in mapping.items()}
        mapping = {key: {whole[key][0]: value} if whole[key] else value for key, value in mapping.items()}
    base = mapping.pop("base", None)
    if base is None:
        return mapping
    if not isinstance(base, str):
        raise RecipeError(f"recipe {path}: base must be a recipe's name or path; got {base!r}", param="base")
    if base in _QUANTIZATIONS:
        raise RecipeError(
            f"recipe {path}: base is the name of a parent recipe, got {base!r}: set quantization: {base}", param="base"
        )
    return layer(cls, _with_base(find(base, path.parent), cls, (*above, path)), mapping)


def layer(cls: type, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above`: mappings are merged, everything else is replaced."""
    return _merge(_without_rivals(cls, below, above), above)


def _without_rivals(cls: type, below: Mapping[str, Any], given: Collection[str]) -> Mapping[str, Any]:
    """Remove from `below` the alternatives of given keys (`cls.ALTERNATIVES`): `steps=10` replaces `tokens`."""
    for group in getattr(cls, "ALTERNATIVES", ()):
        if any(key in given for key in group):
            below = {k: v for k, v in below.items() if k not in group}
    return below


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


# --- mapping to dataclass ---------------------------------------------------------------------------------------------


def read(cls: type[T], mapping: Any, path: str = "", start: T | None = None) -> T:
    """Return settings of class `cls` from a mapping.

    Args:
        cls: A dataclass.
        mapping: Keys and values, as YAML or overrides give them.
        path: The dotted path of this section, for errors.
        start: Settings that give the values of keys that are missing; without it, the class's defaults.

    Raises:
        RecipeError: `param` is the dotted path of the key at fault.
    """
    if isinstance(mapping, Typed):
        mapping = parsed(mapping)
    if not isinstance(mapping, Mapping):
        raise _wrong(path or "the recipe", "a mapping of keys to values", mapping)
    fields = {f.name: f for f in key_fields(cls)}
    for key in mapping:
        if key not in fields:
            raise RecipeError(_unknown(cls, path, key, fields), param=_join(path, key), code="unknown_key")
    hints = typing.get_type_hints(cls, include_extras=True)
    given = {
        key: _convert(hints[key], value, _join(path, key), _default(fields[key], start))
        for key, value in mapping.items()
    }
    missing = [f.name for f in fields.values() if start is None and f.name not in given and _is_required(f)]
    if missing:
        key = _join(path, missing[0])
        raise RecipeError(f"{key} is required ({_name(hints[missing[0]])}): set it", param=key, code="missing_key")
    try:
        return cls(**given) if start is None else dataclasses.replace(start, **given)  # pyright: ignore
    except UserError as error:  # the message of a class's own check starts with the key's name
        param = _join(path, error.param) if error.param else path or None
        raise RecipeError(_join(path, str(error)), param=param, code=error.code) from error


def _unknown(cls: type, path: str, key: Any, fields: Mapping[str, Any]) -> str:
    # A class may declare renamed keys (RENAMED), and keys that it does not take with the reason (REFUSED).
    names = (IN_SECTION if path else OURS) | getattr(cls, "RENAMED", {})
    full, ours = _join(path, key), names.get(str(key), "")
    if reason := getattr(cls, "REFUSED", {}).get(str(key)):
        return f"{full} is not a key: {reason}."
    if ours.startswith("--"):
        return f"{full} is not a key. Use the option {ours}."
    if ours and has_key(cls, ours):
        return f"{full} is not a key. Did you mean {_join(path, ours)}?"
    close = difflib.get_close_matches(str(key), list(fields), n=1)
    if close:
        return f"{full} is not a key. Did you mean {_join(path, close[0])}?"
    return f"{full} is not a key. The keys of {path or 'a recipe'} are {', '.join(fields)}."


def key_fields(settings: Any) -> list[dataclasses.Field]:
    """Return the fields of a settings class, or of an instance, that are keys of a recipe."""
    return [f for f in dataclasses.fields(settings) if f.init and f.metadata.get("is_key", True)]


def has_key(cls: type, dotted: str) -> bool:
    """Return whether settings of this class have the key, such as `lora.r`."""
    name, _, rest = dotted.partition(".")
    hint = typing.get_type_hints(cls).get(name) if name in {f.name for f in key_fields(cls)} else None
    section = section_of(hint)
    return hint is not None and (not rest or (section is not None and has_key(section, rest)))


def section_of(hint: Any) -> type | None:
    """Return the settings class of a section's type hint, which may include None; None for any other hint."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return next((member for member in members if dataclasses.is_dataclass(member)), None)  # pyright: ignore


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field, start: Any) -> Any:
    """Return the value of a field that is not given; a section that is given in part keeps the rest of it."""
    if start is not None:
        return getattr(start, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _convert(hint: Any, value: Any, path: str, default: Any = None) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return read(hint, value, path, default if isinstance(default, hint) else None)  # pyright: ignore
    if origin is Annotated:
        return _count(value, path)
    if origin in (typing.Union, types.UnionType):
        return _member(args, value, path, default)
    if isinstance(value, Typed):
        plain = parsed(value)
        value = value.text if hint is str and not isinstance(plain, str) else plain
    if origin is tuple:
        return _tuple(args, value, path)
    if origin is Mapping:
        return _mapping(value, path)
    if hint is Any:
        return value
    return _scalar(str if origin is typing.Literal else hint, value, path)  # the class checks the choices


def _member(args: tuple, value: Any, path: str, default: Any) -> Any:
    """Convert the value to the first member of a union that accepts it."""
    plain = parsed(value) if isinstance(value, Typed) else value
    if plain is None and type(None) in args:
        return None
    members = [a for a in args if a is not type(None)]
    if isinstance(plain, Mapping) and sum(map(dataclasses.is_dataclass, members)) == 1:
        members = [a for a in members if dataclasses.is_dataclass(a)]  # its error names the key at fault
    if len(members) == 1:
        return _convert(members[0], value, path, default)
    for member in members:
        try:
            return _convert(member, value, path, default)
        except UserError:
            continue
    raise _wrong(path, " or ".join(_name(a) for a in args), plain)


def _tuple(args: tuple, value: Any, path: str) -> tuple:
    if not isinstance(value, list | tuple):
        raise _wrong(path, "a list", value)
    if len(args) == 2 and args[1] is Ellipsis:
        args = (args[0],) * len(value)
    if len(args) != len(value):
        raise _wrong(path, f"a list of {len(args)}", value)
    return tuple(_convert(a, v, f"{path}.{i}") for i, (a, v) in enumerate(zip(args, value, strict=True)))


def _mapping(value: Any, path: str) -> dict[str, Any]:
    """Return a free mapping, whose keys its reader checks (a reward of `rewards`)."""
    if not isinstance(value, Mapping):
        raise _wrong(path, "a mapping of keys to values", value)
    for key in value:
        if not isinstance(key, str):
            raise RecipeError(f"{path} must have text as keys; got {kind_of(key)}", param=path)
    return {key: _untyped(each) for key, each in value.items()}


def _untyped(value: Any) -> Any:
    """Return the value with overrides in it read as YAML."""
    if isinstance(value, Typed):
        return parsed(value)
    if isinstance(value, Mapping):
        return {key: _untyped(each) for key, each in value.items()}
    return [_untyped(each) for each in value] if isinstance(value, list | tuple) else value


def _scalar(hint: Any, value: Any, path: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)  # 1e9 is a float to YAML and a count to people
    if hint not in (bool, int, float, str):
        raise TypeError(f"{path}: a recipe cannot hold a {hint}")
    if type(value) is not hint:
        raise _wrong(path, _name(hint), value)
    return value


def _count(value: Any, path: str) -> int:
    text = value.text if isinstance(value, Typed) else str(value)
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([kKMBT]?)\s*", text)
    number = float(match[1].replace("_", "")) * _SUFFIXES[match[2]] if match else math.nan
    if isinstance(value, bool) or number != round(number, 0):
        raise _wrong(path, "a whole number such as 4096, 300M, 10B or 1e9", value)
    exact = match and re.fullmatch(r"[0-9_]+", match[1])
    return int(match[1].replace("_", "")) * _SUFFIXES[match[2]] if exact and match else round(number)


def read_count(text: str, name: str) -> int:
    """Return the count that an option's text means, such as 4M or 1T; `name` is the option's, for errors."""
    return _count(Typed(text), name)


def _wrong(path: str, expected: str, value: Any) -> RecipeError:
    return RecipeError(f"{path} must be {expected}; got {kind_of(value)}", param=path)


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is Annotated:
        return "a whole number"
    if typing.get_origin(hint) is tuple:
        return "a list"
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
    return plain.get(hint, getattr(hint, "__name__", str(hint)).lower())


# --- dataclass to mapping --------------------------------------------------------------------------------------------


def differences(before: Any, after: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Return (dotted key, old value, new value) for each difference between two settings of one class."""
    found = []
    for field in key_fields(after):
        old, new, key = getattr(before, field.name), getattr(after, field.name), _join(path, field.name)
        if dataclasses.is_dataclass(new) and type(old) is type(new):
            found += differences(old, new, key)
        elif old != new:
            found.append((key, _plain(old, None), _plain(new, None)))
    return found


def dump(settings: Any) -> dict[str, Any]:
    """Return what differs from the defaults, as a mapping that `read` turns into the same settings."""
    return _differing(settings, None)


def whole(settings: Any) -> Any:
    """Return every key with its value, defaults included, as a mapping that `read` turns into the same settings."""
    if dataclasses.is_dataclass(settings):
        return {f.name: whole(getattr(settings, f.name)) for f in key_fields(settings)}
    if isinstance(settings, Mapping):
        return {key: whole(value) for key, value in settings.items()}
    return [whole(value) for value in settings] if isinstance(settings, tuple | list) else settings


def to_yaml(settings: Any) -> str:
    """Return what differs from the defaults as YAML."""
    return yaml_text.write(dump(settings))


def _differing(settings: Any, default: Any) -> dict[str, Any]:
    found = {}
    for field in key_fields(settings):
        value, usual = getattr(settings, field.name), _default(field, default)
        needed = default is None and _is_required(field)
        if needed or value != usual:
            found[field.name] = _plain(value, usual)
    return found


def _plain(value: Any, usual: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _differing(value, usual if type(usual) is type(value) else None)
    if isinstance(value, Mapping):
        return {key: _plain(each, None) for key, each in value.items()}
    return [_plain(v, None) for v in value] if isinstance(value, tuple | list) else value


# --- key names of transformers, TRL, PEFT and Unsloth, and old names, for error messages ------------------------------

# At the top of a recipe, where those libraries' settings are flat. A key is proposed if the training has it.
OURS = {
    "model_name": "model", "model_name_or_path": "model", "teacher_model_name_or_path": "teacher",
    "dataset": "data.path", "dataset_name": "data.path", "dataset_path": "data.path", "train_file": "data.path",
    "chat_template": "data.template", "chat_template_path": "data.template", "output_dir": "--run-dir",
    "run_dir": "--run-dir", "num_train_epochs": "epochs", "num_epochs": "epochs", "max_steps": "steps",
    "batch_size": "batch", "train_batch_size": "batch", "per_device_train_batch_size": "per_device",
    "per_device_batch_size": "per_device", "gradient_accumulation_steps": "accumulate", "max_length": "length",
    "max_seq_length": "length", "seq_length": "length", "learning_rate": "optimizer.lr", "lr": "optimizer.lr",
    "optim": "optimizer.name", "weight_decay": "optimizer.weight_decay", "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2", "adam_epsilon": "optimizer.eps", "max_grad_norm": "optimizer.max_grad_norm",
    "warmup_steps": "schedule.warmup", "warmup": "schedule.warmup", "warmup_ratio": "schedule.warmup",
    "lr_scheduler_type": "schedule.name", "lr_scheduler": "schedule.name", "bf16": "precision.compute",
    "fp16": "precision.compute", "dtype": "precision.compute", "gradient_checkpointing": "remat",
    "logging_steps": "log_every", "save_steps": "checkpoint.every", "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval.every", "r": "lora.r", "rank": "lora.r", "lora_r": "lora.r", "lora_rank": "lora.r",
    "lora_alpha": "lora.lora_alpha", "lora_dropout": "lora.lora_dropout", "target_modules": "lora.target_modules",
    "lora_target_modules": "lora.target_modules", "use_rslora": "lora.use_rslora", "use_dora": "lora.use_dora",
    "modules_to_save": "lora.modules_to_save", "base": "quantization", "load_in_4bit": "quantization",
    "load_in_8bit": "quantization", "clip": "optimizer.max_grad_norm", "beta": "preference.beta",
    "loss_type": "preference.loss_type",
    "label_smoothing": "preference.label_smoothing", "max_new_tokens": "max_completion_length",
    "temperature": "sampling.temperature", "top_p": "sampling.top_p",
    "top_k": "sampling.top_k", "epsilon": "loss.epsilon", "epsilon_high": "loss.epsilon_high",
    "reward_funcs": "rewards", "reward_functions": "rewards",
    "ref_model_mixup_alpha": "reference.mixup_alpha", "ref_model_sync_steps": "reference.sync_every",
    "sync_ref_model": "reference.sync_every",
}  # fmt: skip
# In a section of ours: lora.r, optimizer.learning_rate.
IN_SECTION = {
    "rank": "r", "lora_r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules",
    "rslora": "use_rslora", "dora": "use_dora", "learning_rate": "lr", "adam_beta1": "beta1", "adam_beta2": "beta2",
    "betas": "beta1", "epsilon": "eps", "adam_epsilon": "eps", "clip": "max_grad_norm", "warmup_steps": "warmup",
    "type": "name", "loss": "loss_type", "save_steps": "every", "eval_steps": "every", "save_total_limit": "keep",
    "chat_template": "template", "temp": "temperature", "dtype": "compute",
    "ema": "mixup_alpha", "ref_model_mixup_alpha": "mixup_alpha", "ref_model_sync_steps": "sync_every",
}  # fmt: skip
