"""What is asked of `quantize`, and the checks of it that need no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from nearplane.calibration.hub_texts import need_hub
from nearplane.calibration.mix import check_shares
from nearplane.calibration.text_files import check_named, texts_of
from nearplane.errors import RecipeError
from nearplane.number_formats import integers
from nearplane.recipe.block_scheme import Ends
from nearplane.recipe.file_formats import Format
from nearplane.recipe.format_mix import Cost, Weigh
from nearplane.recipe.rate_scheme import Rows
from nearplane.recipe.readers import Weights
from nearplane.recipe.recipe import FirstToken, Positions, Rare, Recipe
from nearplane.recipe.runtimes import Runtime
from nearplane.recipe.scheme import (
    DEFAULT_GROUP_SIZES,
    Activations,
    Allocation,
    CacheNumbers,
    Order,
    Solver,
    check_apart,
    check_group,
)
from nearplane.recipe.schemes import GridScheme, Scale
from nearplane.recipe.spellings import SPELLINGS
from nearplane.system.arguments import OPEN, ComputeDtype
from nearplane.system.files import check_writable
from nearplane.system.header_shapes import matrices_in
from nearplane.system.output_folder import Unfinished
from nearplane.system.paths import check_path, folder_named, folders_in, path_in
from nearplane.system.progress import Progress
from nearplane.system.progress_bar import bar
from nearplane.system.sizes import Limits

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from nearplane.calibration.given import Encoded

    Text: TypeAlias = str | Path | Sequence[str] | Encoded | Tensor | tuple[Tensor, Tensor]
else:
    PreTrainedModel = PreTrainedTokenizerBase = Any  # these need torch
    Text = str  # of the command line


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """Arguments of `quantize`; an option that is not given has the default of its scheme or of `Recipe`, which check it.

    Args:
        model: Local folder of safetensors, or hub id.
        out: Folder to write.
        recipe: All options of a recipe in one object, instead of keywords.
        bits: Bits per code, 2 to 8. A fraction such as 3.5 is the average over layers; every layer gets a whole number of bits.
            Default: 4.
        group_size: Number of weights that share a step; none is one step per row. Default: auto, which is 128, or the largest of
            64, 32 and 16 that divides the inputs of all layers, or none if 16 does not divide them.
        symmetric: Whether grids have no zero point. Integers in MLX have a minimum of every group instead. Default: true, but
            false with --runtime vllm up to 4 bits, in compressed-tensors.
        grid: Name of a number format, for example int4-g128, int8, int3-g64-asym, nvfp4, mxfp4, fp8, fp8-block or mxfp8. MLX
            takes nvfp4, mxfp4 and mxfp8 of the last five. In a GGUF it may be a type of llama.cpp (q4_0, q4_1, q5_0, q5_1,
            q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4, nvfp4) or one of its mixes (q2_k_m, q3_k_m, q4_k_m,
            q5_k_m). It may also be a number of bits per weight with steps, for example 4.5: types of layers are then chosen by
            measuring. Rows that blocks of 256 do not divide get the type that llama.cpp uses instead.
        embeddings: Type of the embeddings and the head. f32, f16 and bf16 store them unquantized in that type. Default: auto,
            which follows llama.cpp: q6_k for the head, also where it is tied to the embeddings; other embeddings get the type of
            --grid or, if that is a number, the largest type within it.
        format: File format of the checkpoint.
            compressed-tensors (the default) is for vLLM and transformers; gptq, gptq_v2, awq and mlx are for readers of these.
            nearplane is entropy-coded (default with --rate or --size), gguf is for llama.cpp (default with --grid q4_k_m).
        runtime: Program that must load the result: what it does not load is refused, and what only it loads is allowed, such as
            zero points in compressed-tensors with vllm. Default: the rules of transformers, GPTQModel (gptq), llama.cpp (gguf)
            or mlx_lm (mlx).
        activations: Numbers to which runtimes round the inputs of quantized layers: int8 (with --grid int8), fp8 (with
            --grid fp8, fp8-block or mxfp8) or fp4 (with --grid nvfp4 or mxfp4). The solve then takes this rounding into
            account. --layer 'self_attn=grid:fp8,activations:fp8' rounds those of some layers otherwise. Default: none.
        kv_cache: Numbers in which vLLM keeps keys and values: fp8 measures their scales and stores them beside the weights.
            Weights are the same. Default: none, in 16 bits.
        size: Maximum size of the whole checkpoint folder, including the tokenizer: "3.1GB", "800MiB" or a number of bytes. Used
            instead of --rate. With --format gguf, each layer gets a type of llama.cpp, chosen by measuring.
        mix: Number formats from which every layer gets one, chosen by measuring what each costs the network: int3,int4,int8, types
            of llama.cpp, or nvfp4,fp8,w8a8 with inputs rounded as runtimes do; nvfp4a16,fp8a16 for weights alone. bf16 leaves a
            layer unquantized. Needs --size, --bits-per-weight or --served-memory. Default with one of these and --runtime: what
            the runtime takes, int4,int8,bf16 for vllm.
        bits_per_weight: Bits per weight of a mix: bytes of the tensors of all layers that it is chosen for, with steps and
            zero points, on average.
        served_memory: Memory in which a mix is to run, for example 8GB: its weights and the cache of --context tokens.
        context: Tokens whose cache counts in --served-memory, and in --cost bytes-per-token. Default: 8192, or the model's
            maximum length if that is shorter.
        weigh: How experts count in the size of a mix. stored (the default): as all other bytes. active: by the share of tokens
            that reach them.
        cost: What --size of a mix limits: the folder (file, the default), or the bytes that a decode step reads.
        rate: Bits per quantized weight in the file, 0.5 to 7, with every byte of the layers' tensors counted; for example 3.5.
        pre: Name of the tokenizer's pre-tokenizer in llama.cpp, if nearplane does not recognize it.
        like: Unquantized GGUF of the same model by llama.cpp's converter, of any architecture.
            The new file takes its header, tokenizer, names and unquantized tensors. See Serving in the documentation.
        calibration: Calibration text: a .txt or .jsonl file, a folder of such files, wikitext2, c4, or a data set as
            name:config:split, or self: the original network writes the text. A mix is a list with weights: chats.jsonl:2,c4:1.
            Default: FineWeb-Edu sample-10BT.
        samples: Number of calibration windows. Default: 50 tokens per input of the widest layer, at most 524,288 tokens.
        seqlen: Length of a calibration window in tokens. Default: 2048, or the model's maximum length if that is shorter.
        first_token: How each window begins. auto (the default): with the token that the tokenizer sets before a text, if it sets
            one, as the model was trained; it counts in the length. none: without it.
        rare_experts: Treatment of experts that fewer than four tokens per input reach. error: stop the run. mean (the default):
            report them, and fill their Hessians up to one token per input with the mean over the block's experts.
        include_head: Whether the output embeddings (head) are quantized too, after all other layers. Needs --rate, --size or
            --format mlx. Default: false.
        include_embeddings: Whether the input embeddings are quantized too, before the blocks, which then compensate the loss. A
            head that is tied to the embeddings is included by either option. Both always get the average rate. Needs --rate,
            --size or --format mlx. Default: false.
        allocate: Use the same bits for every layer (uniform), or measure where more bits help most (slope).
            Default: slope with --rate, --size or a fraction of bits, else uniform.
        layers: Options for some layers, by a regular expression: {"down_proj": {"bits": 4, "group_size": 32}}. The first that
            is found in the full name of a layer counts.
        ignore: Regular expressions; layers are not quantized if one of them is found in their full name.
        max_loss: Largest relative loss of a layer, for example 0.01. Entropy-coded layers get more bits to keep to it.
            Layers that exceed it are listed, and the command ends with exit code 4.
        solver: Rounding algorithm. nearest-plane is Babai's algorithm (GPTQ). round-to-nearest needs no calibration but loses
            more. k-best keeps several candidates of every row. Default: nearest-plane on grids, k-best for entropy-coded weights.
        beam: Number of candidates that k-best keeps of every row. Default: 8.
        polish: Number of sweeps of coordinate descent over the codes at the end. Default: 1.
        rounds: Number of passes of coordinate descent that fit steps (least squares) and codes together. The codes are then
            solved once more on the fitted steps, and each row keeps the better of the two results. Default: 3.
        order: Order in which columns are rounded: natural is first to last; activation (the default) starts with the inputs of
            largest mean square; pivoted rounds the input with the smallest remaining Schur complement last.
        damp: Damping of the Hessian relative to the mean of its diagonal. auto: the smallest of 1e-4, 1e-3, ... with which the
            Hessian can be factored. Raise the damping if a Hessian is not positive definite. Default: 0.01.
        correct: Whether each target compensates the loss of the layers before it. Default: true.
        tune: After the quantization, train steps, norms and codes against the original's predictions. auto: for at most three
            times as long as that took, auto=5 for five times; training ends where twice as many steps gain little, and does
            not begin where the time is too short to gain. network: as nearplane tune does by default, which takes five to
            eleven times as long. Default: none.
        scale, minimum: See `GridScheme`.
        rows: See `RateScheme`.
        sweep_damp: Damping of the sweep, see `GridScheme`.
        seed, positions, true_sequential: See `Calibration`.
        tokenizer: Tokenizer of a model object. Without one, `out` holds no tokenizer and calibration needs token ids.
        device: Device to compute on: auto (the GPU if there is one), cpu, cuda, or one of several GPUs as cuda:1.
        compute_dtype: Dtype in which blocks run. Default: float32, but bfloat16 for models in bfloat16 on a GPU.
            A dtype that is narrower than the model's also rounds its weights.
        overwrite: Replace an existing checkpoint in OUT, once the new one is complete. Both need room on disk.
        memory: Memory limit of the run, for example 12GB. Default: no limit.
            The run then repeats passes and keeps states on disk. A limit that is too small is refused at once.
        device_memory: The same for the memory of a GPU. Default: what is free there. States then lie in main memory.
        plan_file: File that keeps what was measured for a mix, as soon as it is known. A run of the same model, text and options
            reuses it for any limit; a file of another model, text or options is refused.
        trust_remote_code: Run model code that comes with the checkpoint, and copy it.
        progress: Display that wraps an iterator: (items, label, total) -> items. Default: a bar, on a terminal and in a
            notebook; False shows nothing. "nearplane.system.progress" logs as well.
        spellings: Other tools' names for these options, with their values.
    """

    model: str | Path | PreTrainedModel
    out: str | Path
    recipe: Recipe | None = None
    _: KW_ONLY
    bits: float = OPEN
    group_size: int | Literal["auto"] | None = OPEN
    symmetric: bool = OPEN
    grid: str | None = OPEN
    embeddings: Ends = OPEN
    format: Format | None = OPEN
    runtime: Runtime | None = OPEN
    activations: Activations = OPEN
    kv_cache: CacheNumbers = OPEN
    size: str | None = OPEN
    mix: str | Sequence[str] | None = OPEN
    bits_per_weight: float | None = OPEN
    served_memory: str | None = OPEN
    context: int | None = OPEN
    weigh: Weigh = OPEN
    cost: Cost = OPEN
    rate: float | None = OPEN
    pre: str | None = OPEN
    like: str | None = OPEN
    calibration: Text | None = OPEN
    samples: int | None = OPEN
    seqlen: int | None = OPEN
    first_token: FirstToken = OPEN
    rare_experts: Rare = OPEN
    include_head: bool = OPEN
    include_embeddings: bool = OPEN
    allocate: Allocation | None = OPEN
    layers: Mapping[str, Mapping[str, Any]] = OPEN
    ignore: Sequence[str] = OPEN
    max_loss: float | None = OPEN
    solver: Solver | None = OPEN
    beam: int | None = OPEN
    polish: int | None = OPEN
    rounds: int | None = OPEN
    order: Order = OPEN
    damp: float | Literal["auto"] = OPEN
    correct: bool = OPEN
    tune: str = OPEN
    scale: Scale = OPEN
    minimum: bool = OPEN
    rows: Rows = OPEN
    sweep_damp: float | None = OPEN
    seed: int = OPEN
    positions: Positions | None = OPEN
    true_sequential: bool = OPEN
    tokenizer: PreTrainedTokenizerBase | None = None
    device: str = "auto"
    compute_dtype: ComputeDtype = "auto"
    overwrite: bool = False
    memory: str | int | None = None
    device_memory: str | int | None = None
    plan_file: str | Path | None = None
    trust_remote_code: bool = False
    progress: Progress = bar
    spellings: Mapping[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Return the options that were given."""
        given = {each.name: getattr(self, each.name) for each in fields(QuantizeRequest) if each.default is OPEN}
        return {name: value for name, value in given.items() if value is not OPEN} | dict(self.spellings)

    def data(self) -> dict[str, Any]:
        """Return the calibration data that was passed as an object in place of a path, by its keyword."""
        texts = {word: value for word, value in self.options().items() if SPELLINGS.get(word, word) == "calibration"}
        return {word: value for word, value in texts.items() if value is not None and path_in(value) is None}

    def asked(self) -> Recipe:
        """Return the recipe that was passed, or is made of the options but for `data`.

        Raises:
            RecipeError: There are both, or an option is invalid.
        """
        data = self.data()
        options = {word: value for word, value in self.options().items() if word not in data}
        if self.recipe is not None and options:
            raise RecipeError(f"Pass a recipe or keywords, not both (found a recipe and {', '.join(options)}).")
        return self.recipe or Recipe.from_spellings(**options)

    def check(self, recipe: Recipe) -> Limits:
        """Refuse what can be refused without torch, but of the text only the shares of a mix; return the limits of memory."""
        limits = Limits.of(self.memory, self.device_memory)
        check_named(path_in(self.model))
        if self.plan_file is not None:
            check_path("--plan-file", self.plan_file)
            check_writable(Path(self.plan_file).absolute().parent)
            if Path(self.out).resolve() in Path(self.plan_file).resolve().parents:
                raise RecipeError(
                    f"--plan-file {self.plan_file} lies in {self.out}, which must be empty when the run begins. Name a file "
                    f"elsewhere."
                )
            if recipe.mix is None:
                raise RecipeError("--plan-file keeps what was measured for a mix. Use --mix, or leave it out.")
        for scheme in recipe.schemes:
            check_apart(scheme)
        _check_number_formats(recipe)
        _check_groups(recipe, path_in(self.model))
        if recipe.like is not None:
            check_path("--like", recipe.like)
            if not Path(recipe.like).is_file():
                raise RecipeError(
                    f"--like {recipe.like} is not a file. Pass a GGUF by llama.cpp's convert_hf_to_gguf.py."
                )
        if (samples := recipe.calibration.samples) is not None and (texts := texts_of(recipe.calibration.calibration)):
            check_shares(texts, samples)  # else the model decides
        Unfinished(Path(self.out), overwrite=self.overwrite, sources=folders_in(self.model))
        if recipe.scheme.calibrated and recipe.calibration.calibration is None and not self.data():
            need_hub("Without --calibration the text is FineWeb-Edu from the Hugging Face hub")
        return limits


def _check_groups(recipe: Recipe, model: str | Path | None) -> None:
    """Refuse a group size that does not divide the inputs of a layer, which headers of files tell without torch.

    Only where all layers have one grid: what is decided of single layers is checked when the network is known.

    Raises:
        RecipeError: It does not divide them.
    """
    alike = not (recipe.layers or recipe.ignore or recipe.mix or recipe.allocate != "uniform")
    folder = None if model is None else folder_named(model)
    if folder is None or not alike or not isinstance(recipe.scheme, GridScheme) or recipe.scheme.group_size == "auto":
        return
    inputs = {name.removesuffix(".weight"): columns for name, (_, columns) in matrices_in(folder).items()}
    for name, columns in inputs.items():
        check_group(recipe.scheme.number_format, name, columns, inputs.values())


def _check_number_formats(recipe: Recipe) -> None:
    """Refuse schemes whose weights no layer of a file of this format can hold.

    Raises:
        RecipeError: The format does not hold them; the message says which it holds.
    """
    bits, widths = getattr(recipe.scheme, "bits", None), recipe.readers.widths
    if recipe.allocate != "uniform" and isinstance(bits, float) and widths and bits < widths[0]:
        program = recipe.readers.programs[-1].title
        raise RecipeError(
            f"--bits is {bits:g}, but {program} takes at least {widths[0]} from {recipe.format}. Use more bits, another --format "
            f"or another --runtime."
        )
    schemes = [("all layers", recipe.scheme, recipe.activations)]
    schemes += [
        (f"layers {each.pattern!r}", each.scheme, each.activations or recipe.activations) for each in recipe.layers
    ]
    if recipe.mix is not None:
        schemes = [(f"--mix {each.word}", each.scheme, each.activations) for each in recipe.mix.offers if each.scheme]
    for name, scheme, activations in schemes:
        schemes_of = [scheme.grouped([size]) for size in DEFAULT_GROUP_SIZES]  # equal unless layers decide the size
        if recipe.allocate != "uniform":
            integer_formats = [integers(bits, None) for bits in recipe.readers.widths]
            schemes_of = [each.stored_in(other) for other in integer_formats for each in schemes_of] or schemes_of
        weights = [Weights(each.number_format, activations != "none") for each in schemes_of]
        if not any(map(recipe.readers.takes, weights)):
            if recipe.mix is not None:
                words = recipe.readers.words
                raise RecipeError(f"{name}: {recipe.readers.reason(weights[0])}. Name formats as {', '.join(words)}.")
            recipe.readers.check(name, weights[0])
