package partition

import "strconv"

// Slots is the number of slots that keys are spread over when the sender does not know the number
// of partitions. A partition owns the slots whose number, modulo the number of partitions, equals
// its own.
const Slots = Max

// Slot returns the name of a key's slot: "holdfast.slot." and the CRC-32 of the key's bytes modulo
// Slots.
func Slot(key string) string { return SlotName(Of(key, "", Slots)) }

// SlotName returns the name of a slot.
func SlotName(slot int) string { return "holdfast.slot." + strconv.Itoa(slot) }

// slotNames has the names of all slots.
var slotNames = func() map[string]bool {
	all := make(map[string]bool, Slots)
	for slot := range Slots {
		all[SlotName(slot)] = true
	}
	return all
}()

// IsSlot reports whether name is the name of a slot.
func IsSlot(name string) bool { return slotNames[name] }
