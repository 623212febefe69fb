package partition

import "strconv"

// Slots is how many slots keys are spread over, where the sender does not know the number of
// partitions. Each partition has those whose number modulo that of the partitions is its own.
const Slots = Max

// Slot returns the name of a key's slot: "holdfast.slot." and the CRC-32 of its bytes modulo Slots.
func Slot(key string) string { return SlotName(Of(key, "", Slots)) }

// SlotName returns the name of a slot.
func SlotName(slot int) string { return "holdfast.slot." + strconv.Itoa(slot) }

// slotNames are all of them.
var slotNames = func() map[string]bool {
	all := make(map[string]bool, Slots)
	for slot := range Slots {
		all[SlotName(slot)] = true
	}
	return all
}()

// IsSlot reports whether a text is the name of a slot.
func IsSlot(name string) bool { return slotNames[name] }
