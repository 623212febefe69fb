import { startBuying, user } from "./buying.js";
import { follow } from "./live.js";
import { showBroken, startTrials } from "./trials.js";

const demo = "demo" in document.getElementById("main").dataset;
const begin = () => follow(user(), demo ? showBroken : () => {});

if (demo) startTrials();
document.getElementById("user").addEventListener("change", begin);
begin();
startBuying(demo);
