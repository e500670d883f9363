"""Families of timm transformers, small: the name to build them by, and the arguments that make them small."""

from typing import Any

SMALL = {"img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": 4, "num_classes": 10}
SMALL14 = {**SMALL, "img_size": 56}
SWIN = {"depths": (2, 2), "num_heads": (2, 4), "embed_dim": 32, "num_classes": 10}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", SMALL),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", SMALL),
    "deit3": ("deit3_small_patch16_224", SMALL),
    "dinov2_registers": ("vit_small_patch14_reg4_dinov2", SMALL14),
    "qk_norm": ("vit_tiny_patch16_224", {**SMALL, "qk_norm": True}),
    "clip": ("vit_base_patch32_clip_224", SMALL),
    "siglip": ("vit_base_patch16_siglip_224", SMALL),
    "relative_position": ("vit_relpos_small_patch16_224", SMALL),
    "beit": ("beit_base_patch16_224", SMALL),
    "eva": ("eva_giant_patch14_224", SMALL14),
    "eva02": ("eva02_tiny_patch14_224", SMALL14),
    "cait": ("cait_xxs24_224", SMALL),
    "pit": ("pit_ti_224", {"img_size": 64, "depth": (1, 1, 1), "num_classes": 10}),
    "tnt": ("tnt_s_legacy_patch16_224", {"img_size": 64, "depth": 2, "embed_dim": 96, "num_classes": 10}),
    "swin": ("swin_tiny_patch4_window7_224", {**SWIN, "img_size": 112}),
    "swin_padded": ("swin_tiny_patch4_window7_224", {**SWIN, "img_size": 96}),
    "swinv2": ("swinv2_tiny_window8_256", {**SWIN, "img_size": 128}),
}
