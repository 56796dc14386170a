// The words of the frame. The words of each tab are in its own file; their keys begin with the tab's name.

export const words = {
  en: {
    uiSkip: "To the content",
    uiTabs: "Parts of the page",
    uiRuns: "Runs",
    uiTrain: "Train",
    uiPlan: "Plan",
    uiData: "Data",
    uiChat: "Chat",
    uiLoading: "Loading…",
    uiFailed: "That did not work: {error}",
    uiGone: "The server does not answer. Runs go on without it; start it again with: penjing ui",
    uiNoToken: "This page needs the whole address that `penjing ui` printed, with the token at its end.",
    uiCopyCommand: "Copy the command",
    uiCommand: "The same on a command line",
  },
  zh: {
    uiSkip: "跳到内容",
    uiTabs: "页面的各部分",
    uiRuns: "运行",
    uiTrain: "训练",
    uiPlan: "规划",
    uiData: "数据",
    uiChat: "对话",
    uiLoading: "加载中…",
    uiFailed: "没有成功：{error}",
    uiGone: "服务器没有回应。训练不受影响；重新启动：penjing ui",
    uiNoToken: "请使用 `penjing ui` 打印的完整地址，末尾带有令牌。",
    uiCopyCommand: "复制命令",
    uiCommand: "等价的命令行",
  },
};
