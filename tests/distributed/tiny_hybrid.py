"""A hybrid of the size of `tiny`, with every kind of layer that has no experts."""

MODEL = {
    "num_layers": 6,
    "hybrid_layer_pattern": "M-M*-M",
    "activation_func": "squared_relu",
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_state_dim": 6,
    "mamba_num_groups": 2,
}
EXPERTS = MODEL | {
    "hybrid_layer_pattern": "ME*EM-",
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
}
LATENT_EXPERTS = EXPERTS | {"moe_latent_size": 12}
