"""Mask R-CNN and Cascade Mask R-CNN on a Swin backbone, for inference with MMDetection's weights."""
