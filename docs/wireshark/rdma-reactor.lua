-- Messages of two reactors over iWARP, as docs/wire.md has them, behind Wireshark's own dissectors of MPA, DDP and RDMAP.
-- Copy it to the folder of personal Lua plugins (Help, About, Folders), or: tshark -X lua_script:rdma-reactor.lua
-- Display filters begin with `rdxr`. Connections without a greeting, such as those of Framing::Raw, are left alone.

-- Wireshark 4.0 joins the segments of a Send before it calls others, and then leaves out all but the first Send of a packet.
-- Only this run is told: the preferences on disk stay.
set_preference("iwarp_ddp_rdmap.reassemble_iwarp_rdma_send", false)

local rdxr = Proto("rdxr", "rdma-reactor")

local kinds = {
    [0] = "Data", "Hello", "Credit", "Ping", "Pong", "Immediate", "Offer", "Fetched", "Goodbye", "Handshake", "Fragment",
    "Progress", "Refused",
}
local BARE = { [1] = true, [2] = true, [3] = true, [4] = true, [8] = true }
local HANDSHAKE, FRAGMENT = 9, 10
local parts = { [0] = "More", "Last", "Refusal" }
local reasons = {
    [0] = "refused", "not a greeting", "another version", "limits", "busy", "the peer takes plain connections",
    "the peer takes TLS", "the peer takes a pre-shared key", "draining",
    "only peers in shared memory",
}
local securities = { [0] = "plain", "TLS", "pre-shared key" }

local f = rdxr.fields
f.version = ProtoField.uint8("rdxr.greeting.version", "Version")
f.reason = ProtoField.uint8("rdxr.greeting.reason", "Reason, in a reject", base.DEC, reasons)
f.features = ProtoField.uint8("rdxr.greeting.features", "Features", base.HEX)
f.extensions = ProtoField.bool("rdxr.greeting.extensions", "Immediate data and atomics", 8, nil, 0x01)
f.security = ProtoField.uint8("rdxr.greeting.security", "Security", base.DEC, securities, 0x30)
f.window = ProtoField.uint32("rdxr.greeting.window", "Window, messages")
f.buffer = ProtoField.uint32("rdxr.greeting.buffer", "Largest message in one buffer, bytes")
f.largest = ProtoField.uint32("rdxr.greeting.largest", "Largest message, KiB")
f.user = ProtoField.bytes("rdxr.greeting.user", "Private data of the program")
f.path = ProtoField.uint32("rdxr.greeting.path", "Hash of the path within the host", base.HEX)
f.kind = ProtoField.uint8("rdxr.kind", "Kind", base.DEC, kinds)
f.following = ProtoField.uint24("rdxr.following", "Fragments that follow")
f.grant = ProtoField.uint32("rdxr.grant", "Grant, messages since the start")
f.payload = ProtoField.bytes("rdxr.payload", "Payload")
f.length = ProtoField.uint32("rdxr.length", "Length of the payload in this segment, bytes")
f.sealed = ProtoField.bytes("rdxr.sealed", "Sealed payload and tag")
f.value = ProtoField.uint32("rdxr.immediate.value", "Immediate data", base.HEX)
f.written = ProtoField.uint32("rdxr.immediate.length", "Length of the write, bytes")
f.number = ProtoField.uint32("rdxr.transfer", "Transfer")
f.address = ProtoField.uint64("rdxr.offer.address", "Address", base.HEX)
f.offered = ProtoField.uint64("rdxr.offer.length", "Length, bytes")
f.key = ProtoField.uint32("rdxr.offer.key", "Key", base.HEX)
f.tag = ProtoField.uint64("rdxr.offer.tag", "Tag", base.HEX)
f.done = ProtoField.uint64("rdxr.progress.done", "Bytes fetched")
f.part = ProtoField.uint8("rdxr.handshake.part", "Part", base.DEC, parts)
f.octets = ProtoField.bytes("rdxr.handshake.octets", "Octets")
f.why = ProtoField.string("rdxr.handshake.refusal", "Reason")
f.continued = ProtoField.uint32("rdxr.continuation", "Continues a message, at its byte")

local unknown = ProtoExpert.new("rdxr.unknown", "an unknown kind or part, or reserved bits", expert.group.PROTOCOL, expert.severity.ERROR)
local short = ProtoExpert.new("rdxr.short", "not the length that it has to have", expert.group.PROTOCOL, expert.severity.ERROR)
rdxr.experts = { unknown, short }

local stream_of = Field.new("tcp.stream")
local port_of = Field.new("tcp.srcport")
local private_data = Field.new("iwarp_mpa.privatedata")
local offset_of = Field.new("iwarp_ddp.mo")
local number_of = Field.new("iwarp_ddp.msn")
local is_last = Field.new("iwarp_ddp.last_flag")

-- By the number of the TCP stream: the connections with a greeting. Each has, by the port that it comes from, the number of the last
-- message without a seal.
local connections = {}

function rdxr.init()
    connections = {}
end

-- Of several frames in a packet, the last one is the one that is being dissected.
local function last(field)
    local all = { field() }
    return all[#all]
end

-- A greeting in private data: with revision 2 of MPA it follows four octets.
local function greeting(data)
    local bytes = data.range
    for _, at in ipairs({ 0, 4 }) do
        if bytes:len() >= at + 20 and bytes(at, 4):string() == "RDXR" then
            return bytes(at)
        end
    end
end

-- The connection of this packet, if its greeting was seen.
local function connection()
    local stream = stream_of()
    if not stream then
        return nil
    end
    local known = connections[stream.value]
    if not known then
        local data = last(private_data)
        if data and greeting(data) then
            known = { unsealed = {} }
            connections[stream.value] = known
        end
    end
    return known
end

local function add_greeting(bytes, tree)
    local branch = tree:add(rdxr, bytes, "rdma-reactor, greeting")
    branch:add(f.version, bytes(4, 1))
    branch:add(f.reason, bytes(6, 1))
    local features = branch:add(f.features, bytes(7, 1))
    for _, field in ipairs({ f.extensions, f.security }) do
        features:add(field, bytes(7, 1))
    end
    branch:add_le(f.window, bytes(8, 4))
    branch:add_le(f.buffer, bytes(12, 4))
    branch:add_le(f.largest, bytes(16, 4))
    local len = math.min(bytes(5, 1):uint(), bytes:len() - 20)
    if len > 0 then
        branch:add(f.user, bytes(20, len))
    end
    if bytes:len() == 24 + len then
        branch:add_le(f.path, bytes(20 + len, 4))
    end
end

-- Payloads of the reactor's own messages, by their kinds: the length, and what they have.
local payloads = {
    [5] = { 8, { { f.value, 0, 4 }, { f.written, 4, 4 } } },
    [6] = { 28, { { f.number, 0, 4 }, { f.address, 8, 8 }, { f.offered, 16, 8 }, { f.key, 24, 4 } } },
    [7] = { 4, { { f.number, 0, 4 } } },
    [12] = { 4, { { f.number, 0, 4 } } },
    [11] = { 12, { { f.number, 0, 4 }, { f.done, 4, 8 } } },
}

-- Returns true if the message is the last one without a seal.
local function add_handshake(payload, branch)
    local part = payload(0, 1):uint()
    branch:add(f.part, payload(0, 1))
    if not parts[part] then
        branch:add_tvb_expert_info(unknown, payload(0, 1))
    elseif payload:len() > 1 then
        branch:add(part == 2 and f.why or f.octets, payload(1))
    end
    return part == 1
end

local function add_payload(kind, payload, branch)
    local own = payloads[kind]
    local tagged = kind == 6 and payload:len() == own[1] + 8
    if own and (payload:len() == own[1] or tagged) then
        for _, field in ipairs(own[2]) do
            branch:add_le(field[1], payload(field[2], field[3]))
        end
        if tagged then
            branch:add_le(f.tag, payload(own[1], 8))
        end
    elseif own or BARE[kind] then
        branch:add_tvb_expert_info(short, payload)
    else
        branch:add(f.payload, payload)
    end
end

-- A Send of RDMAP, or the part of one that is in an FPDU.
local function message(tvb, pinfo, tree)
    local known = connection()
    local offset, number = last(offset_of), last(number_of)
    if not known or not offset or not number then
        return false
    end
    pinfo.cols.protocol = "RDXR"
    if offset.value > 0 then
        tree:add(rdxr, tvb(), "rdma-reactor, continued"):add(f.continued, tvb(), offset.value)
        return true
    end
    if tvb:len() < 8 then
        tree:add(rdxr, tvb(), "rdma-reactor"):add_tvb_expert_info(short, tvb())
        return true
    end
    local kind, following = tvb(0, 1):uint(), tvb(1, 3):le_uint()
    local port = port_of().value
    local name = kinds[kind] or ("unknown kind " .. kind)
    local branch = tree:add(rdxr, tvb(), "rdma-reactor, " .. name)
    branch:add(f.kind, tvb(0, 1))
    branch:add_le(f.following, tvb(1, 3))
    branch:add_le(f.grant, tvb(4, 4))
    if not kinds[kind] or (following > 0 and kind ~= FRAGMENT) then
        branch:add_tvb_expert_info(unknown, tvb(0, 4))
    end
    local len = tvb:len() - 8
    branch:add(f.length, len):set_generated()
    local more = last(is_last).value and "" or " and more"
    pinfo.cols.info:append(" [" .. name .. (len > 0 and (" " .. len .. " B" .. more) or "") .. "] ")
    -- Other messages of the packet do not replace it.
    pinfo.cols.info:fence()
    -- Messages are numbered from 1, modulo 2^32.
    local unsealed = known.unsealed[port]
    local ahead = unsealed and (number.value - unsealed) % 0x100000000 or 0
    if len == 0 then
        if payloads[kind] or kind == HANDSHAKE then
            branch:add_tvb_expert_info(short, tvb())
        end
    elseif ahead > 0 and ahead < 0x80000000 then
        branch:add(f.sealed, tvb(8))
    elseif kind ~= HANDSHAKE then
        add_payload(kind, tvb(8), branch)
    elseif add_handshake(tvb(8), branch) and not pinfo.visited then
        known.unsealed[port] = number.value
    end
    return true
end

rdxr:register_heuristic("iwarp_ddp_rdmap", message)

-- Behind all others: greetings.
function rdxr.dissector(_, pinfo, tree)
    local data = last(private_data)
    local bytes = data and greeting(data)
    if bytes and connection() then
        pinfo.cols.protocol = "RDXR"
        add_greeting(bytes, tree)
    end
end

register_postdissector(rdxr)
