import { startBuying, user } from "./buying.js";
import { follow } from "./live.js";
import { showBroken, startTrials } from "./trials.js";

const { trials, opens } = document.getElementById("main").dataset;
const begin = () => follow(user(), showBroken);

if (trials !== undefined) startTrials();
document.getElementById("user").addEventListener("change", begin);
begin();
startBuying(opens !== undefined);
