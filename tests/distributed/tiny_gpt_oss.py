"""A gpt-oss of the size of `tiny`: a window that is shorter than its rows in every other layer."""

MODEL = {
    "num_layers": 4,
    "softmax_type": "learnable",
    "sliding_window": 3,
    "add_bias_linear": True,
    "activation_func": "quick_gelu",
    "activation_func_clamp_value": 1.5,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "init_method_std": 0.2,
}
