from __future__ import annotations

import pytest

from common.errors import SettingError
from common.settings import read_settings
from handlers.settings import Settings


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "-1", "-0.5", "십초"])
def test_a_setting_in_seconds_is_finite_and_not_negative(text: str) -> None:
    with pytest.raises(SettingError, match=r"REQUEST_TIMEOUT_S is .*, must be a number from 0 on"):
        read_settings(Settings, {"REQUEST_TIMEOUT_S": text})


def test_a_setting_in_seconds_may_have_a_fraction() -> None:
    assert read_settings(Settings, {"REQUEST_TIMEOUT_S": "0.5"}).request_timeout_s == 0.5
