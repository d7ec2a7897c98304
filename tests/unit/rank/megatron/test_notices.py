import logging
import warnings

from nemo_rl_mcore.rank.megatron import Once, tell_once

UPSTREAM = "GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes ..."


def test_a_notice_of_deprecation_is_one_line_and_others_pass(capsys):
    log = logging.Logger("megatron.core.models.gpt.gpt_model")
    log.addHandler(logging.StreamHandler())
    log.addFilter(Once())
    for message in (UPSTREAM, UPSTREAM, "something else", UPSTREAM):
        log.warning(message)
    assert capsys.readouterr().err == (
        "megatron-core: GPTModel is deprecated there (told once)\nsomething else\n"
    )


def test_the_logger_of_upstream_is_filtered_and_only_its_own_warnings_are():
    log = logging.getLogger("megatron.core.models.gpt.gpt_model")
    before = list(log.filters)
    log.filters[:] = [one for one in before if not isinstance(one, Once)]
    others = len(log.filters)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(2):
                tell_once()
            assert len(log.filters) == others + 1
            warnings.warn("full scope is deprecated. Use empty cuda_graph_modules", stacklevel=1)
            warnings.warn(
                "`torch.distributed.reduce_scatter_tensor` is deprecated.", FutureWarning, stacklevel=1
            )
            warnings.warn("`torch.distributed.other` is deprecated.", FutureWarning, stacklevel=1)
            warnings.warn("a deprecated key of mine", DeprecationWarning, stacklevel=1)
        assert [str(one.message) for one in heard] == [
            "`torch.distributed.other` is deprecated.",
            "a deprecated key of mine",
        ]
    finally:
        log.filters[:] = before
