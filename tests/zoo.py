"""Models nobody here wrote, unmodified: torchvision, timm and Hugging Face, with random weights.

Each entry is a function that returns (model, example).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Entry = Callable[[], tuple[nn.Module, Any]]


def image(size: int = 64) -> Tensor:
    return torch.randn(3, 3, size, size)


def tokens(length: int = 16, vocabulary: int = 50) -> Tensor:
    return torch.randint(0, vocabulary, (3, length))


def vision(name: str, size: int = 64, **kwargs: Any) -> tuple[nn.Module, Any]:
    return getattr(import_module("torchvision.models"), name)(weights=None, **kwargs), image(size)


def timm(name: str, size: int = 64, **kwargs: Any) -> tuple[nn.Module, Any]:
    return import_module("timm").create_model(name, pretrained=False, **kwargs), image(size)


def hugging(model: str, config: str, *, names: Sequence[str] = ("input_ids",), **kwargs: Any) -> tuple[nn.Module, Any]:
    transformers = import_module("transformers")
    settings = getattr(transformers, config)(**kwargs)
    return getattr(transformers, model)(settings), {name: tokens() for name in names}


def hearing(model: str, config: str, example: Callable[[], dict[str, Tensor]], **kwargs: Any) -> tuple[nn.Module, Any]:
    transformers = import_module("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**kwargs)), example()


TORCHVISION: dict[str, Entry] = {
    "resnet18": partial(vision, "resnet18"),
    "resnet50": partial(vision, "resnet50"),
    "vgg11_bn": partial(vision, "vgg11_bn"),
    "mobilenet_v3_small": partial(vision, "mobilenet_v3_small"),
    "densenet121": partial(vision, "densenet121"),
    "convnext_tiny": partial(vision, "convnext_tiny"),
    "efficientnet_b0": partial(vision, "efficientnet_b0"),
    "shufflenet_v2_x0_5": partial(vision, "shufflenet_v2_x0_5"),
    "googlenet": partial(vision, "googlenet", init_weights=False),
    "squeezenet1_1": partial(vision, "squeezenet1_1"),
    "regnet_y_400mf": partial(vision, "regnet_y_400mf"),
    "resnext50_32x4d": partial(vision, "resnext50_32x4d"),
    "vit_b_16": partial(vision, "vit_b_16", image_size=64),
    "swin_t": partial(vision, "swin_t"),
}

TIMM: dict[str, Entry] = {
    name: partial(timm, name, **kwargs)
    for name, kwargs in {
        "resnetv2_50": {},
        "mixer_s32_224": {"img_size": 64},
        "vit_tiny_patch16_224": {"img_size": 64},
        "res2net50_26w_4s": {},
        "hrnet_w18_small": {},
        "dla34": {},
        "nf_regnet_b0": {},
        "repvgg_a0": {},
        "convmixer_768_32": {},
        "ghostnet_100": {},
        "cspresnet50": {},
        "poolformer_s12": {},
        "mobilevit_xxs": {},
        "skresnet18": {},
    }.items()
}

HUGGING: dict[str, Entry] = {
    "gpt2": partial(
        hugging, "GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4
    ),
    "bert": partial(
        hugging, "BertForMaskedLM", "BertConfig", vocab_size=50, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=64, max_position_embeddings=16,
    ),
    "llama": partial(
        hugging, "LlamaForCausalLM", "LlamaConfig", vocab_size=50, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, max_position_embeddings=32,
    ),
    "t5": partial(
        hugging, "T5ForConditionalGeneration", "T5Config", names=("input_ids", "decoder_input_ids"),
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
    ),
}  # fmt: skip

TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
GROUPED: dict[str, Any] = {**TINY, "num_key_value_heads": 2}
SHORT: dict[str, Any] = {**TINY, "max_position_embeddings": 16}

MORE: dict[str, Entry] = {
    "alexnet": partial(vision, "alexnet"),
    "mnasnet0_5": partial(vision, "mnasnet0_5"),
    "mobilenet_v2": partial(vision, "mobilenet_v2"),
    "inception_v3": partial(vision, "inception_v3", size=299, init_weights=False),
    "maxvit_t": partial(vision, "maxvit_t", size=224),
    "swin_v2_t": partial(vision, "swin_v2_t"),
    "efficientnet_v2_s": partial(vision, "efficientnet_v2_s"),
    "wide_resnet50_2": partial(vision, "wide_resnet50_2"),
    **{
        name: partial(timm, name)
        for name in (
            "resnest14d", "edgenext_xx_small", "mobileone_s0", "rexnet_100", "selecsls42", "tresnet_m", "vovnet39a",
            "pvt_v2_b0", "fastvit_t8", "repvit_m1", "inception_next_tiny", "hardcorenas_a", "lcnet_050", "dpn68",
            "darknet53", "ese_vovnet19b_dw", "gernet_s", "eca_nfnet_l0", "focalnet_tiny_srf", "starnet_s1",
            "mambaout_femto", "rdnet_tiny", "efficientvit_b0", "mobilenetv4_conv_small", "davit_tiny",
        )
    },
    **{
        name: partial(timm, name, img_size=64)
        for name in (
            "xcit_nano_12_p16_224", "deit_tiny_patch16_224", "beit_base_patch16_224", "cait_xxs24_224",
            "visformer_tiny", "twins_svt_small", "gmlp_ti16_224", "resmlp_12_224", "volo_d1_224", "nest_tiny",
            "tnt_s_patch16_224",
        )
    },
    **{
        name: partial(timm, name, size=size)
        for name, size in (
            ("levit_128s", 224), ("coatnet_0_rw_224", 224), ("efficientformer_l1", 224), ("convit_tiny", 224),
            ("lambda_resnet26t", 128), ("halonet26t", 256), ("botnet26t_256", 256), ("crossvit_tiny_240", 240),
            ("mvitv2_tiny", 224), ("gcvit_xxtiny", 224), ("hiera_tiny_224", 224), ("sequencer2d_s", 224),
            ("tiny_vit_5m_224", 224), ("eva02_tiny_patch14_224", 224),
        )
    },
    "distilbert": partial(
        hugging, "DistilBertForMaskedLM", "DistilBertConfig", vocab_size=50, dim=32, n_layers=2, n_heads=4,
        hidden_dim=64, max_position_embeddings=16,
    ),
    "roberta": partial(hugging, "RobertaForMaskedLM", "RobertaConfig", **{**TINY, "max_position_embeddings": 20}),
    "electra": partial(hugging, "ElectraForMaskedLM", "ElectraConfig", embedding_size=32, **SHORT),
    "albert": partial(hugging, "AlbertForMaskedLM", "AlbertConfig", embedding_size=16, **SHORT),
    "gptneox": partial(hugging, "GPTNeoXForCausalLM", "GPTNeoXConfig", **SHORT),
    "mistral": partial(hugging, "MistralForCausalLM", "MistralConfig", **GROUPED),
    "qwen2": partial(hugging, "Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "qwen3": partial(hugging, "Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **GROUPED),
    "gemma": partial(hugging, "GemmaForCausalLM", "GemmaConfig", head_dim=8, **GROUPED),
    "phi": partial(hugging, "PhiForCausalLM", "PhiConfig", **TINY),
    "bloom": partial(hugging, "BloomForCausalLM", "BloomConfig", vocab_size=50, hidden_size=32, n_layer=2, n_head=4),
    "gptj": partial(
        hugging, "GPTJForCausalLM", "GPTJConfig", vocab_size=50, n_embd=32, n_layer=2, n_head=4, rotary_dim=8,
        n_positions=16,
    ),
    "opt": partial(
        hugging, "OPTForCausalLM", "OPTConfig", vocab_size=50, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, ffn_dim=64, max_position_embeddings=16, word_embed_proj_dim=32,
    ),
    "whisper": partial(
        hearing, "WhisperForConditionalGeneration", "WhisperConfig",
        lambda: {"input_features": torch.randn(3, 8, 40), "decoder_input_ids": tokens(6)},
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    ),
    "wav2vec2": partial(
        hearing, "Wav2Vec2ForCTC", "Wav2Vec2Config", lambda: {"input_values": torch.randn(3, 400)},
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, apply_spec_augment=False, layerdrop=0.0,
        pad_token_id=0,
    ),
}  # fmt: skip
