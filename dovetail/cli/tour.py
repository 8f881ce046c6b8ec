"""`dovetail tour`: download and prompt a real model, then pretrain, fine-tune and reward a tiny one, in minutes."""

import typer

MODEL = "smollm2-135m"
QUESTION = "Why is the sky blue? Answer in two sentences."
ANIMALS = {"cat": "small", "dog": "loyal", "fox": "clever", "owl": "wise", "bear": "strong", "hare": "quick"}


def tour(
    prompt: str = typer.Option(QUESTION, help="Prompt for the model."),
    max_tokens: int = typer.Option(96, min=1, help="Maximum tokens of the answer."),
    steps: int = typer.Option(200, min=0, help="Steps of training a model of a million weights; 0: do not train."),
) -> None:
    """Download and prompt a small model, then pretrain, fine-tune and reward a tiny one."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print("[bold]Dovetail[/bold]: one model definition from pretraining to serving\n")
    kernels = _compile_kernels()
    path = _download(console)
    model = _load(console, path)
    _wait(console, kernels)
    _prompt(console, model, prompt, max_tokens)
    if steps:
        del model
        _pretrain(console, steps)


def _compile_kernels():
    """Start to compile the CPU's kernels, if it needs them: meanwhile the model is downloaded and loaded."""
    import threading

    def compile_them() -> None:
        from dovetail.engine.device.kernels import compile_kernels
        from dovetail.io.compiled import keep_compiled

        keep_compiled()
        compile_kernels(quantized=True)  # the package registry's file is

    thread = threading.Thread(target=compile_them, daemon=True)
    thread.start()
    return thread


def _wait(console, kernels) -> None:
    kernels.join(0.2)
    if kernels.is_alive():
        with console.status("  compiling kernels for this CPU; they are kept"):
            kernels.join()


def _step(console, number: int, what: str) -> None:
    console.print(f"[bold cyan]{number}[/bold cyan] [bold]{what}[/bold]")


def _download(console):
    from dovetail.core.reporter import bar
    from dovetail.io import hub

    entry = hub.CATALOGUE[MODEL]
    _step(console, 1, f"Download {entry.hub_id}")
    with bar() as progress:
        path = hub.resolve(MODEL, progress)
    console.print(f"  {path} ({entry.licence})\n", style="dim", markup=False, soft_wrap=True)
    return path


def _load(console, path):
    import time

    import dovetail
    from dovetail.cli.tables import pairs
    from dovetail.core.reporter import bar
    from dovetail.io.load import served_blocks

    _step(console, 2, "Load")
    start = time.perf_counter()
    with bar() as progress:
        model = dovetail.load(path, progress=progress, quantization=served_blocks(path))
    rows = model.summary()
    console.print(pairs(f"loaded in {time.perf_counter() - start:.1f} s", rows))
    console.print()
    return model


def _prompt(console, model, prompt: str, max_tokens: int) -> None:
    import time

    _step(console, 3, "Prompt")
    console.print("  [bold]you[/bold]    ", end="")
    console.print(prompt, markup=False, soft_wrap=True)
    console.print("  [bold]model[/bold]  ", end="")
    ids = model.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    stream = model.tokenizer.stream()
    times = [time.perf_counter()]
    for token in model.generate(ids, max_tokens):
        times.append(time.perf_counter())
        console.print(stream.push(token), end="", markup=False, soft_wrap=True)
    console.print(stream.flush(), markup=False, soft_wrap=True)
    console.print(f"\n{_speed(times, len(ids))}", style="dim")


def _speed(times: list[float], prompt_tokens: int) -> str:
    """Return the rate after the first token, whose time includes compiling and the prompt."""
    new = len(times) - 1
    if new < 2:
        return f"  {new} tokens"
    first, rest = times[1] - times[0], times[-1] - times[1]
    rate = (new - 1) / rest
    return f"  {new} tokens, {rate:.1f} tok/s after the first ({first:.1f} s: compile, {prompt_tokens} prompt tokens)"


def _pretrain(console, steps: int) -> None:
    import shutil

    from dovetail.cli.train import run
    from dovetail.io.hub import home

    console.print()
    _step(console, 4, "Pretrain a model of a million weights on generated stories: dovetail pretrain tiny")
    folder = home() / "tour" / "tiny"
    shutil.rmtree(folder, ignore_errors=True)  # a run that exists would be continued
    overrides = [f"steps={steps}", f"schedule.warmup={steps // 10}", f"eval.every={-(-steps // 4)}"]
    run("pretrain", "tiny", [*overrides, f"checkpoint.export_hf={steps}"], str(folder))
    exported = folder / "export" / f"step_{steps}"
    _complete(console, exported, "One day ", 120)
    _fine_tune(console, exported, max(1, steps * 2 // 5))


def _fine_tune(console, model, steps: int) -> None:
    import shutil

    import dovetail
    from dovetail.io.hub import home

    console.print()
    _step(console, 5, "Fine-tune it on questions: dovetail sft")
    folder, question = home() / "tour" / "sft", "What is the owl like?"
    shutil.rmtree(folder, ignore_errors=True)
    examples = [
        {"prompt": f"What is the {animal} like?", "completion": f" The {animal} is {kind}."}
        for animal, kind in ANIMALS.items()
    ]
    _complete(console, model, question, 24, "before")
    dovetail.sft(
        model=str(model), data=examples, steps=steps, batch=8, length=64, packing=True, run_dir=folder,
        optimizer={"lr": 2e-3}, precision={"compute": "f32"},
    )  # fmt: skip
    _complete(console, folder / "export" / f"step_{steps}", question, 24, "after")
    _reward(console, folder / "export" / f"step_{steps}", max(1, steps // 5))


def _reward(console, model, steps: int) -> None:
    import shutil

    import dovetail
    from dovetail.io.hub import home

    console.print()
    _step(console, 6, "Reward it for every letter e: dovetail rl")
    folder, question = home() / "tour" / "rl", "What is the owl like?"
    shutil.rmtree(folder, ignore_errors=True)
    ended = dovetail.rl(
        model=str(model), data=[{"prompt": f"What is the {animal} like?"} for animal in ANIMALS], rewards=[letters_e],
        prompts=6, num_generations=8, max_prompt_length=32, max_completion_length=24, steps=steps, run_dir=folder,
        optimizer={"lr": 1e-3}, precision={"compute": "f32"}, show_every=0,
    )  # fmt: skip
    console.print(f"  reward {_first(folder):.2f} at the start, {ended.metrics['reward']:.2f} at the end")
    _complete(console, folder / "export" / f"step_{steps}", question, 24, "after")
    console.print(f"\n  [bold]dovetail serve {folder / 'export' / f'step_{steps}'}[/bold] serves it", soft_wrap=True)


def letters_e(prompts, completions, **columns) -> list[float]:
    """Return the share of letters e in each completion, the reward of the tour."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def _first(folder) -> float:
    import json

    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["reward"]


def _complete(console, folder, start: str, tokens: int, when: str = "output") -> None:
    import dovetail

    model = dovetail.load(folder)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(list(model.generate(tokenizer.encode(start), tokens)))
    console.print(f"  [bold]{when}[/bold]  {start}", end="")
    console.print(text.replace("\n", " "), markup=False, soft_wrap=True)
