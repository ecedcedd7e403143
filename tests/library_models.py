"""Models that nobody here wrote: transformers, timm and torchvision, small, with random weights, never downloaded.

`NAMES` lists them; `build(name)` gives a model in eval mode and its inputs, the same at every call. Neither library is
imported before the first `build`, so that collecting the tests costs nothing.

An architecture is a line in a table: its name in its library, its inputs, and the options that keep it small. Random
initialisation leaves zeros and ones behind (biases, layer scales, statistics) that would hide a wrong replay: `build`
puts noise on them.
"""

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Options = dict[str, Any]
Built = tuple[nn.Module, tuple, Options]


class LibraryModel(NamedTuple):
    library: str
    name: str
    inputs: Callable[[], Options]
    options: Options
    head: str = "AutoModel"

    def make(self) -> nn.Module:
        makers = {"transformers": self._transformers, "timm": self._timm, "torchvision": self._torchvision}
        return makers[self.library]()

    def _transformers(self) -> nn.Module:
        import_module("torchvision_ops")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        transformers = import_module("transformers")
        config = transformers.AutoConfig.for_model(self.name, **self.options)
        return getattr(transformers, self.head).from_config(config)

    def _timm(self) -> nn.Module:
        import_module("torchvision_ops")
        return import_module("timm").create_model(self.name, pretrained=False, num_classes=10, **self.options)

    def _torchvision(self) -> nn.Module:
        import_module("torchvision_ops")
        return import_module("torchvision").models.get_model(self.name, weights=None, **self.options)


def build(name: str) -> Built:
    """The model in eval mode, its positional and its keyword inputs. The global generator is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        case = MODELS[name]
        model = case.make().eval()
        add_noise(model)
        inputs = case.inputs()
    return (model, (), inputs) if case.library == "transformers" else (model, tuple(inputs.values()), {})


def is_installed(name: str) -> bool:
    return find_spec(MODELS[name].library) is not None


@torch.no_grad()
def add_noise(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.numel() and parameter.min() == parameter.max():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.add_(torch.rand_like(buffer), alpha=0.1)


def tensors_in(value: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in an output with its path: containers, `ModelOutput`s, and the attributes of caches."""
    yield from _tensors_in(value, "output", set())


def _tensors_in(value: object, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, nn.Module | type) or id(value) in seen:
        return
    else:
        seen.add(id(value))
        for key, part in _parts(value):
            yield from _tensors_in(part, f"{path}{key}", seen)


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):  # a ModelOutput is one
        return ((f"[{key!r}]", part) for key, part in value.items())
    if isinstance(value, tuple | list):
        return ((f"[{i}]", part) for i, part in enumerate(value))
    return ((f".{key}", part) for key, part in getattr(value, "__dict__", {}).items())


# ---- inputs ----------------------------------------------------------------------------------------------------------

BATCH, LENGTH, VOCABULARY = 2, 12, 100


def ids(length: int = LENGTH) -> Tensor:
    return torch.randint(5, VOCABULARY - 5, (BATCH, length))


def tokens(length: int = LENGTH) -> Options:
    return {"input_ids": ids(length)}


def text() -> Options:
    """Two sentences, the second padded."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -3:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def translation() -> Options:
    return text() | {"decoder_input_ids": ids(6)}


def labelled(inputs: Callable[[], Options]) -> Callable[[], Options]:
    """With labels: the output holds a loss."""
    return lambda: inputs() | {"labels": ids()}


def image(size: int = 32, key: str = "pixel_values") -> Options:
    return {key: torch.randn(BATCH, 3, size, size)}


def image64() -> Options:
    return image(64)


def captioned() -> Options:
    return text() | image()


def video(frames: int) -> Callable[[], Options]:
    return lambda: {"pixel_values": torch.randn(1, frames, 3, 32, 32)}


def sound() -> Options:
    return {"input_values": torch.randn(BATCH, 800)}


def series() -> Options:
    past, future = 10, 4
    return {
        "past_values": torch.randn(BATCH, past),
        "past_time_features": torch.randn(BATCH, past, 2),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": torch.randn(BATCH, future),
        "future_time_features": torch.randn(BATCH, future, 2),
    }


# ---- transformers ----------------------------------------------------------------------------------------------------

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BODY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = BODY | SPECIAL | {"vocab_size": VOCABULARY, "max_position_embeddings": 64}
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ENCODER_DECODER = {
    "d_model": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "decoder_start_token_id": 2,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
} | SPECIAL  # fmt: skip
T5 = {
    "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "vocab_size": VOCABULARY, "decoder_start_token_id": 0,
}  # fmt: skip
SERIES = ENCODER_DECODER | {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 2, "input_size": 1,
}  # fmt: skip
IMAGE = BODY | {"image_size": 32, "patch_size": 8}
WINDOWS = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
}  # fmt: skip
PYRAMID = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 1, 1]}
DETECTOR = ENCODER_DECODER | {"num_queries": 5, "num_labels": 3, "use_timm_backbone": False, "backbone": None}
SOUND = BODY | {
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 40, "pad_token_id": 0,
}  # fmt: skip
PAIR = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}


def resnet(*stages: int) -> Options:
    """A backbone that gives the features of these stages."""
    return {"backbone_config": {"model_type": "resnet", **RESNET, "out_features": [f"stage{i}" for i in stages]}}


TRANSFORMERS = {
    # encoders of text
    "bert": (text, TEXT),
    "roberta": (text, TEXT),
    "distilbert": (text, TEXT),
    "deberta": (text, TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "deberta-v2": (text, TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}),
    "albert": (text, TEXT | {"embedding_size": 16}),
    "electra": (text, TEXT | {"embedding_size": 16}),
    "modernbert": (text, TEXT | {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2}),
    "mpnet": (text, TEXT),
    "rembert": (text, TEXT | {"input_embedding_size": 16}),
    "convbert": (text, TEXT | {"embedding_size": 16}),
    "mobilebert": (text, TEXT),
    "squeezebert": (text, TEXT | {"embedding_size": 32}),
    "ibert": (text, TEXT),
    "roformer": (text, TEXT),
    "canine": (text, TEXT),
    "fnet": (tokens, TEXT),
    "nystromformer": (text, TEXT),
    "yoso": (text, TEXT),
    "esm": (text, TEXT | {"mask_token_id": 3, "position_embedding_type": "rotary"}),
    "longformer": (
        lambda: text() | {"global_attention_mask": torch.eye(LENGTH, dtype=torch.long)[:1].repeat(BATCH, 1)},
        TEXT | {"attention_window": [4, 4]},
    ),
    "big_bird": (
        lambda: tokens(48), TEXT | {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
    ),
    "reformer": (
        lambda: tokens(16),
        TEXT | {
            "attn_layers": ["local", "lsh"], "axial_pos_embds_dim": (8, 24), "axial_pos_shape": (4, 4),
            "attention_head_size": 8, "num_hashes": 2, "num_buckets": 4, "feed_forward_size": 64,
            "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4,
        },
    ),
    "tapas": (text, TEXT | {"type_vocab_sizes": [3, 8, 8, 2, 8, 8, 4]}),
    "layoutlm": (lambda: text() | {"bbox": torch.randint(0, 9, (BATCH, LENGTH, 1)).repeat(1, 1, 4)}, TEXT),
    # decoders of text
    "gpt2": (text, TEXT),
    "gpt_neo": (text, TEXT | {"attention_types": [[["global", "local"], 1]]}),
    "gpt_neox": (text, TEXT),
    "gptj": (text, TEXT | {"rotary_dim": 4}),
    "opt": (text, TEXT | {"word_embed_proj_dim": 16, "ffn_dim": 64}),
    "bloom": (text, TEXT),
    "falcon": (text, TEXT),
    "mpt": (text, TEXT | {"n_heads": 4, "n_layers": 2}),
    "phi": (text, TEXT),
    "phi3": (text, GROUPED),
    "llama": (text, GROUPED),
    "mistral": (text, GROUPED | {"sliding_window": 4}),
    "gemma2": (text, GROUPED | {"sliding_window": 4}),
    "gemma3_text": (text, GROUPED | {"sliding_window": 4}),
    "qwen2": (text, GROUPED),
    "qwen3": (text, GROUPED),
    "glm": (text, GROUPED),
    "olmo2": (text, GROUPED),
    "cohere": (text, GROUPED),
    "nemotron": (text, GROUPED),
    "xlnet": (text, SPECIAL | {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "ctrl": (text, TEXT | {"dff": 64}),
    "imagegpt": (tokens, {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    # experts, chosen by the content
    "mixtral": (text, GROUPED | {"num_local_experts": 4}),
    "qwen2_moe": (text, EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_moe": (text, EXPERTS),
    "gpt_oss": (text, GROUPED | {"num_local_experts": 4}),
    "granitemoe": (text, GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        text,
        EXPERTS | {
            "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        },
    ),
    # state spaces and other recurrences
    "mamba": (text, TEXT),
    "mamba2": (text, TEXT | {"head_dim": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 8, "state_size": 8}),
    "falcon_mamba": (text, TEXT),
    "jamba": (
        text,
        GROUPED | {
            "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "recurrent_gemma": (tokens, GROUPED),
    "rwkv": (tokens, TEXT),
    "lfm2": (text, GROUPED | {"layer_types": ["conv", "full_attention"]}),
    "minimax": (text, GROUPED | {"num_local_experts": 4, "block_size": 8}),
    # encoder and decoder
    "t5": (translation, T5),
    "longt5": (translation, T5 | {"local_radius": 3}),
    "umt5": (translation, T5),
    "switch_transformers": (
        translation, T5 | {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "bart": (translation, ENCODER_DECODER),
    "pegasus": (translation, ENCODER_DECODER),
    "marian": (translation, ENCODER_DECODER),
    "m2m_100": (translation, ENCODER_DECODER),
    "led": (
        translation,
        ENCODER_DECODER | {
            "attention_window": [4, 4], "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
        },
    ),
    "prophetnet": (
        translation,
        SPECIAL | {
            "hidden_size": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "decoder_start_token_id": 1,
            "num_encoder_layers": 2, "num_encoder_attention_heads": 4, "encoder_ffn_dim": 64,
            "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 64,
        },
    ),
    # images
    "vit": (image, IMAGE),
    "deit": (image, IMAGE),
    "beit": (image, IMAGE | {"use_relative_position_bias": True}),
    "dinov2": (image, IMAGE),
    "dinov3_vit": (image, IMAGE),
    "yolos": (image, IMAGE | {"image_size": [32, 32], "num_detection_tokens": 5}),
    "vit_mae": (image, IMAGE),
    "dpt": (image, IMAGE | {"backbone_out_indices": [0, 1, 0, 1], "is_hybrid": False}),
    "swin": (image, WINDOWS),
    "swinv2": (image, WINDOWS),
    "segformer": (image64, PYRAMID | {"num_attention_heads": [1, 2, 3, 4]}),
    "pvt_v2": (image64, PYRAMID | {"image_size": 64, "num_attention_heads": [1, 2, 3, 4]}),
    "convnext": (image64, PYRAMID),
    "convnextv2": (image64, PYRAMID),
    "poolformer": (image64, PYRAMID),
    "resnet": (image64, RESNET),
    "regnet": (image64, RESNET | {"groups_width": 8}),
    "bit": (image64, {"embedding_size": 32, "hidden_sizes": [32, 64, 64, 64], "depths": [1, 1, 1, 1], "num_groups": 8}),
    "mobilenet_v2": (image64, {"depth_multiplier": 0.25}),
    "mobilevit": (
        image64,
        {
            "image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
            "intermediate_size": 32, "num_attention_heads": 4,
        },
    ),
    "focalnet": (
        image,
        {
            "image_size": 32, "patch_size": 4, "embed_dim": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
            "focal_levels": [2, 2], "focal_windows": [3, 3],
        },
    ),
    "hiera": (
        image,
        {
            "embed_dim": 16, "image_size": [32, 32], "patch_size": [7, 7], "patch_stride": [4, 4],
            "patch_padding": [3, 3], "masked_unit_size": [2, 2], "depths": [1, 1], "num_heads": [1, 2],
            "query_stride": [2, 2], "num_query_pool": 1,
        },
    ),
    "detr": (image64, DETECTOR | resnet(4), "AutoModelForObjectDetection"),
    "conditional_detr": (image64, DETECTOR | resnet(4), "AutoModelForObjectDetection"),
    "deformable_detr": (image64, DETECTOR | resnet(2, 3, 4), "AutoModelForObjectDetection"),
    "sam": (
        lambda: {"pixel_values": torch.randn(1, 3, 32, 32), "input_points": 32 * torch.rand(1, 1, 2, 2)},
        {
            "vision_config": IMAGE | {
                "output_channels": 16, "num_pos_feats": 8, "global_attn_indexes": [1], "window_size": 2, "mlp_dim": 64,
            },
            "prompt_encoder_config": {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
            "mask_decoder_config": {
                "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 32,
                "iou_head_hidden_dim": 16,
            },
        },
    ),
    "videomae": (video(4), IMAGE | {"num_frames": 4, "tubelet_size": 2}),
    "vivit": (video(4), IMAGE | {"num_frames": 4, "tubelet_size": [2, 8, 8]}),
    "timesformer": (video(2), IMAGE | {"num_frames": 2}),
    # text with images
    "clip": (captioned, PAIR),
    "blip": (captioned, PAIR),
    "owlvit": (captioned, PAIR),
    "groupvit": (
        captioned,
        PAIR | {
            "projection_intermediate_dim": 32,
            "vision_config": IMAGE | {
                "depths": [1, 1, 1], "num_group_tokens": [4, 2, 0], "num_output_groups": [4, 2, 0],
            },
        },
    ),
    "vilt": (captioned, TEXT | IMAGE | {"max_image_length": -1}),
    "git": (captioned, TEXT | {"vision_config": IMAGE}),
    "visual_bert": (
        lambda: text() | {"visual_embeds": torch.randn(BATCH, 4, 16)}, TEXT | {"visual_embedding_dim": 16},
    ),
    "lxmert": (
        lambda: text() | {"visual_feats": torch.randn(BATCH, 4, 16), "visual_pos": torch.rand(BATCH, 4, 4)},
        TEXT | {"l_layers": 1, "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16},
    ),
    "llava": (
        lambda: image() | {"input_ids": torch.cat([torch.full((BATCH, 16), 99), ids()], dim=1)},
        {
            "text_config": {"model_type": "llama"} | GROUPED, "image_token_index": 99, "vision_feature_layer": -1,
            "vision_config": {"model_type": "clip_vision_model"} | IMAGE,
        },
    ),
    # sound
    "wav2vec2": (sound, SOUND),
    "hubert": (sound, SOUND),
    "wavlm": (sound, SOUND),
    "sew": (sound, SOUND | {"squeeze_factor": 2}),
    "wav2vec2-conformer": (sound, SOUND),
    "whisper": (
        lambda: {"input_features": torch.randn(BATCH, 8, 40), "decoder_input_ids": ids(6)},
        ENCODER_DECODER | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 20},
    ),
    "speech_to_text": (
        lambda: {"input_features": torch.randn(BATCH, 40, 8), "decoder_input_ids": ids(6)},
        ENCODER_DECODER | {
            "input_feat_per_channel": 8, "max_source_positions": 40, "max_target_positions": 20, "conv_channels": 16,
        },
    ),
    "audio-spectrogram-transformer": (
        lambda: {"input_values": torch.randn(BATCH, 32, 16)},
        IMAGE | {"num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8},
    ),
    "encodec": (
        lambda: {"input_values": torch.randn(1, 1, 320)},
        {
            "num_filters": 4, "hidden_size": 16, "codebook_size": 32, "upsampling_ratios": [4, 2], "num_lstm_layers": 1,
            "num_residual_layers": 1, "target_bandwidths": [6.0], "sampling_rate": 8000, "audio_channels": 1,
        },
    ),
    "vits": (
        lambda: {"input_ids": torch.randint(1, 39, (1, 8))},
        {
            "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32,
            "flow_size": 32, "spectrogram_bins": 9, "upsample_initial_channel": 16, "upsample_rates": [2, 2],
            "upsample_kernel_sizes": [4, 4], "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
            "prior_encoder_num_flows": 2, "posterior_encoder_num_wavenet_layers": 2,
            "prior_encoder_num_wavenet_layers": 2, "duration_predictor_num_flows": 2,
            "duration_predictor_filter_channels": 32, "depth_separable_num_layers": 2,
        },
    ),
    # other things
    "perceiver": (
        lambda: {"inputs": torch.randn(BATCH, LENGTH, 32)},
        {
            "num_latents": 8, "d_latents": 16, "d_model": 32, "num_blocks": 1, "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4, "num_cross_attention_heads": 4,
        },
    ),
    "time_series_transformer": (series, SERIES),
    "informer": (series, SERIES),
    "patchtst": (
        lambda: {"past_values": torch.randn(BATCH, 32, 2)},
        {
            "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "num_input_channels": 2,
            "context_length": 32, "patch_length": 8, "patch_stride": 8,
        },
    ),
    "decision_transformer": (
        lambda: {
            "states": torch.randn(1, 4, 5), "actions": torch.randn(1, 4, 3), "rewards": torch.randn(1, 4, 1),
            "returns_to_go": torch.randn(1, 4, 1), "timesteps": torch.arange(4)[None],
            "attention_mask": torch.ones(1, 4),
        },
        SPECIAL | {"hidden_size": 32, "n_layer": 2, "n_head": 4, "state_dim": 5, "act_dim": 3, "max_ep_len": 16},
    ),
}  # fmt: skip

LOSSES = {
    "bert": "AutoModelForMaskedLM",
    "gpt2": "AutoModelForCausalLM",
    "llama": "AutoModelForCausalLM",
    "mixtral": "AutoModelForCausalLM",
    "t5": "AutoModelForSeq2SeqLM",
}

# ---- timm ------------------------------------------------------------------------------------------------------------

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
SWIN = {"window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
MIXER = {"img_size": 32}

TIMM: dict[str, tuple[int, Options]] = {
    # convolutions
    "resnet18": (64, {}),
    "resnest14d": (64, {}),
    "skresnet18": (64, {}),
    "ecaresnet26t": (64, {}),
    "res2net50_14w_8s": (64, {}),
    "nf_resnet26": (64, {}),
    "eca_nfnet_l0": (64, {}),
    "regnetx_002": (64, {}),
    "regnety_002": (64, {}),
    "repvgg_a0": (64, {}),
    "mobileone_s0": (64, {}),
    "densenet121": (64, {}),
    "dla46_c": (64, {}),
    "dpn48b": (64, {}),
    "inception_v3": (96, {}),
    "hrnet_w18_small": (64, {}),
    "ese_vovnet19b_slim": (64, {}),
    "cspresnet50": (64, {}),
    "efficientnet_b0": (64, {}),
    "mixnet_s": (64, {}),
    "mnasnet_small": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mobilenetv4_conv_small_035": (64, {}),
    "ghostnetv2_100": (64, {}),
    "lcnet_050": (64, {}),
    "rexnet_100": (64, {}),
    "starnet_s1": (64, {}),
    "convnext_atto": (64, {}),
    "convnextv2_atto": (64, {}),
    "inception_next_atto": (64, {}),
    "mambaout_femto": (64, {}),
    # attention
    "vit_tiny_patch16_224": (32, VIT),
    "vit_relpos_small_patch16_224": (32, VIT),
    "deit_tiny_distilled_patch16_224": (32, VIT),
    "beit_base_patch16_224": (32, VIT),
    "eva02_tiny_patch14_224": (32, VIT),
    "naflexvit_base_patch16_gap": (32, {"embed_dim": 32, "depth": 2, "num_heads": 2}),
    "cait_xxs24_224": (32, VIT),
    "xcit_nano_12_p8_224": (32, VIT),
    "convit_tiny": (32, {"img_size": 32, "depth": 4}),
    "crossvit_tiny_240": (48, {}),
    "swin_tiny_patch4_window7_224": (32, SWIN | {"img_size": 32}),
    "swinv2_tiny_window8_256": (32, SWIN | {"img_size": 32}),
    "swinv2_cr_tiny_224": (64, SWIN | {"img_size": 64, "window_size": 2}),
    "lambda_resnet26t": (64, {}),
    "efficientvit_b0": (64, {}),
    # both
    "levit_128s": (64, {"img_size": 64}),
    "coatnet_nano_rw_224": (64, {"img_size": 64}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "coat_tiny": (32, {"img_size": 32}),
    "edgenext_xx_small": (64, {}),
    "fastvit_t8": (64, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "tiny_vit_5m_224": (64, {}),
    "swiftformer_xs": (64, {}),
    # neither
    "mixer_s32_224": (64, {"img_size": 64}),
    "resmlp_12_224": (32, MIXER),
    "gmlp_ti16_224": (32, MIXER),
    "poolformer_s12": (64, {}),
}

# ---- torchvision -----------------------------------------------------------------------------------------------------


def pair() -> Options:
    return {"first": torch.rand(1, 3, 128, 128), "second": torch.rand(1, 3, 128, 128)}


def clip() -> Options:
    return {"x": torch.rand(1, 3, 4, 32, 32)}


TORCHVISION: dict[str, tuple[Callable[[], Options], Options]] = {
    "alexnet": (image64, {}),
    "vgg11": (image64, {}),
    "resnet18": (image64, {}),
    "googlenet": (image64, {"init_weights": False}),
    "squeezenet1_1": (image64, {}),
    "shufflenet_v2_x0_5": (image64, {}),
    "mobilenet_v2": (image64, {}),
    "efficientnet_b0": (image64, {}),
    "regnet_y_400mf": (image64, {}),
    "convnext_tiny": (image64, {}),
    "swin_v2_t": (image64, {}),
    "r3d_18": (clip, {}),
    "raft_small": (pair, {}),
    "lraspp_mobilenet_v3_large": (image64, {"weights_backbone": None}),
}

MODELS = {
    **{f"transformers/{name}": LibraryModel("transformers", name, *case) for name, case in TRANSFORMERS.items()},
    **{
        f"transformers/{name}-loss": LibraryModel("transformers", name, labelled(text), TRANSFORMERS[name][1], head)
        for name, head in LOSSES.items()
    },
    **{
        f"timm/{name}": LibraryModel("timm", name, lambda size=size: image(size, key="x"), options)
        for name, (size, options) in TIMM.items()
    },
    **{f"torchvision/{name}": LibraryModel("torchvision", name, *case) for name, case in TORCHVISION.items()},
}
NAMES = tuple(MODELS)
