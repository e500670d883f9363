"""Section 3 of the paper: KL gradients, perturbations, and approximations of the Fisher information matrix."""
