from __future__ import annotations

import pytest

from pipeline.config import Config
from pipeline.serverwatch import ServerWatch
from tests.answering import answering, pages


@pytest.mark.parametrize(
    ("wanted", "shown"), [pytest.param("mine", "mine", id="named"), pytest.param(None, "first", id="left open")]
)
async def test_of_several_models_the_one_that_is_asked_is_shown(wanted: str | None, shown: str) -> None:
    found = {"/health": "", "/v1/models": {"data": [{"id": "first"}, {"id": "mine"}]}}
    with answering(pages(found)) as url:
        server = {"base_url": f"{url}/v1", "served_model_name": wanted}
        watch = ServerWatch(Config.model_validate({"serving": {"server": server}}), lambda _ready: None)
        await watch._poll()
        await watch.close()
    assert (watch.view.state, watch.view.model) == ("ready", shown)
