"""What is supported, and how well: the tables `fimaq list` prints."""

MEASURED = "accuracy measured on real weights"
TESTED = "tested with random weights"

MODELS = [
    ("ViT", "vit_tiny_patch16_224, vit_small_patch16_224, vit_base_patch16_224", f"Tiny: {MEASURED}"),
    ("DeiT", "deit_tiny_patch16_224, deit_small_patch16_224, deit_base_patch16_224", f"Tiny: {MEASURED}"),
    ("Swin", "swin_tiny_patch4_window7_224, swin_small_..., swin_base_...", f"a narrow one: {MEASURED}"),
    ("DeiT distilled, DeiT-III", "deit_tiny_distilled_patch16_224, deit3_small_patch16_224", TESTED),
    ("DINOv2 with registers", "vit_small_patch14_reg4_dinov2", TESTED),
    ("ViT with qk-norm, relative positions", "vit_relpos_small_patch16_224", TESTED),
    ("CLIP and SigLIP image towers", "vit_base_patch32_clip_224, vit_base_patch16_siglip_224", TESTED),
    ("BEiT, EVA, EVA-02", "beit_base_patch16_224, eva02_tiny_patch14_224", TESTED),
    ("CaiT, PiT", "cait_xxs24_224, pit_ti_224", TESTED),
    ("Swin-V2", "swinv2_tiny_window8_256", TESTED),
    (
        "Mask R-CNN, Cascade Mask R-CNN (--task detection)",
        "mask_rcnn_swin_t, cascade_mask_rcnn_swin_s",
        f"small ones: AP measured; {TESTED}",
    ),
    (
        "any other timm model",
        "of Linear, Conv2d, LayerNorm and softmax attention",
        "opened and checked at run time; refused with the reason where that fails",
    ),
]

METHODS = [
    ("rtn", "range search only"),
    ("qdrop", "block reconstruction with MSE (the paper's baseline)"),
    ("brecq", "squared KL gradients as a diagonal"),
    ("diag", "Diag-FIM: the paper's diagonal"),
    ("rank1", "the paper's rank-one approximation"),
    ("lowrank", "LR-FIM: rank k, growing during reconstruction"),
    ("fima-q", "DPLR-FIM (default): alpha * low rank + (1 - alpha) * diagonal"),
]
