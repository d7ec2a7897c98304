import logging
import warnings

from nemo_rl_mcore.rank.megatron import quiet_notices

UPSTREAM = "GPTModel IS DEPRECATED. GPTModel is only accepting critical bug fixes ..."


def test_notices_of_upstream_are_dropped_and_only_its_own_are(capsys):
    log = logging.getLogger("megatron.core.models.gpt.gpt_model")
    before, handler = list(log.filters), logging.StreamHandler()
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(2):
                quiet_notices()
            for message in (UPSTREAM, "something else", UPSTREAM):
                log.warning(message)
            warnings.warn("full scope is deprecated. Use empty cuda_graph_modules", stacklevel=1)
            warnings.warn(
                "`torch.distributed.reduce_scatter_tensor` is deprecated.", FutureWarning, stacklevel=1
            )
            warnings.warn("`torch.distributed.other` is deprecated.", FutureWarning, stacklevel=1)
            warnings.warn("a deprecated key of mine", DeprecationWarning, stacklevel=1)
        assert len(log.filters) <= len(before) + 1
        assert capsys.readouterr().err == "something else\n"
        assert [str(one.message) for one in heard] == [
            "`torch.distributed.other` is deprecated.",
            "a deprecated key of mine",
        ]
    finally:
        log.filters[:] = before
        log.removeHandler(handler)
